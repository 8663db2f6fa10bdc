"""`srun gradus bench synthetic`: each task is a rank, and the lines of the lab come once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from slurm.lab import Lab

pytestmark = pytest.mark.slow


def test_tasks_of_two_nodes_are_ranks_of_one_benchmark(lab: Lab, tmp_path: Path):
    command = [sys.executable, "-m", "gradus", "bench", "synthetic", "--model", "mnist-cnn", "--batch-size", "2"]
    sizes = ["--num-iters", "2", "--num-batches-per-iter", "2", "--num-warmup-batches", "1"]
    out = lab.run("srun", "--quiet", "-N2", "-n2", *command, *sizes, timeout=300, cwd=tmp_path)
    assert out.count("Total img/sec on 2 CPU(s): ") == 1
    assert out.count("Iter #1: ") == 1
    assert list(tmp_path.iterdir()) == []
