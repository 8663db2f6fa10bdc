"""Planning is quick: 175 billion parameters on 1,024 GPUs are hardly more work than a small model on eight."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

RECIPE = {
    "name": "planned",
    "data": {"use": "synthetic-tokens"},
    "batch": 1536,
    "tokens": 300_000_000_000,
    "optimizer": {"lr": 1e-4, "clip": 1.0},
}
MOST_BYTES = 4 * 2**30


def processor_seconds(folder: Path, model: str, gpus: int) -> float:
    """Of `gradus plan` and all that it starts."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "model": {"use": model}}))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [
        sys.executable,
        "-m",
        "gradus",
        "plan",
        "recipe.yaml",
        "--cluster",
        "selene",
        "--gpus",
        str(gpus),
        "--json",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
def test_gpt_3_on_1024_gpus_is_hardly_more_work_than_gpt_2_on_8_and_takes_little_memory(tmp_path: Path) -> None:
    """Layers that are alike are traced once, and a search does not grow with the GPUs. 9.2 s against 7.4 in 2026."""
    small = processor_seconds(tmp_path, "gpt2-124m", 8)
    assert processor_seconds(tmp_path, "gpt3-175b", 1024) < 2 * small
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < MOST_BYTES
