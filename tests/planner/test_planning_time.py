"""Planning is quick: 175 billion parameters on 1,024 GPUs, traced and searched in seconds and little memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

GPT_3 = {
    "name": "gpt-3",
    "model": {"use": "gpt3-175b"},
    "data": {"use": "synthetic-tokens"},
    "batch": 1536,
    "tokens": 300_000_000_000,
    "optimizer": {"lr": 1e-4, "clip": 1.0},
}
MOST_SECONDS, MOST_BYTES = 10.0, 4 * 2**30


@pytest.mark.slow
def test_gpt_3_on_1024_gpus_takes_less_than_ten_seconds_and_4_gib(tmp_path: Path) -> None:
    """Seconds of the processor: one process after the other works, and other tests may run beside them."""
    (tmp_path / "gpt3.yaml").write_text(yaml.safe_dump(GPT_3))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "gradus", "plan", "gpt3.yaml", "--cluster", "selene", "--gpus", "1024", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < MOST_SECONDS
    assert after.ru_maxrss * 1024 < MOST_BYTES
