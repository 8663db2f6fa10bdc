"""`gradus bench collectives` inside of an allocation uses its nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from slurm.lab import Lab

pytestmark = pytest.mark.slow


def test_in_an_allocation_the_ranks_are_on_its_nodes(lab: Lab, tmp_path: Path):
    command = [sys.executable, "-m", "gradus", "bench", "collectives", "all-reduce", "--nproc", "2"]
    sizes = ["--from", "1024", "--to", "4096", "--json"]
    out = lab.run("salloc", "--quiet", "-N2", "-n2", *command, *sizes, timeout=300, cwd=tmp_path)
    document = json.loads(out)
    assert [row["ranks"] for row in document["rows"]] == [4, 4]
    assert document["wrong"] == 0
