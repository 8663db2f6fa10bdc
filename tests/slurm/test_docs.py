"""The commands of docs/slurm.md, in their order, on a real scheduler."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gradus_command import wait_until
from slurm.jobs import PATIENCE_SECONDS, Run
from slurm.lab import Lab

ROOT = Path(__file__).parents[2]
SHORTER = ("--set", "evaluate.batches=1", "--set", "model.layers=1", "--set", "model.width=32", "--set", "log_every=1")

MORE_THAN_IT_GETS = 4000  # before it is stopped and cancelled, however fast the machine


@pytest.mark.slow
def test_every_command_of_the_page_works(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    text = (ROOT / "docs" / "slurm.md").read_text()
    found = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    commands = [shlex.split(line, comments=True)[1:] for block in found for line in block.splitlines()]
    assert [words[0] for words in commands].count("submit") == 3
    with Lab(gpus=0) as lab:
        for words in commands:
            if words[0] in ("train", "submit"):
                words += SHORTER
            if words[0] == "submit":
                words += ("--set", f"steps={MORE_THAN_IT_GETS}")
            done = subprocess.run(
                [sys.executable, "-m", "gradus", *words],
                cwd=tmp_path,
                env={**lab.environment, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=PATIENCE_SECONDS,
            )
            assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
            _wait_for_what_it_does(lab, tmp_path, words)


def _wait_for_what_it_does(lab: Lab, folder: Path, words: list[str]) -> None:
    """Until a run has begun, has stopped, goes on, or has left."""
    run = Run(lab, folder / "runs" / "quickstart" / "first")
    if words[0] == "submit" and "first" in words:
        run.until_step(2)
    if words[:2] == ["runs", "stop"]:
        run.until(lambda: "held" in run.in_queue().lower())
    if words[:2] == ["runs", "release"]:
        wait_until(lambda: run.ranks, seconds=PATIENCE_SECONDS)
    if words[:2] == ["runs", "cancel"]:
        run.ended()
    if "checked" in words:
        Run(lab, folder / "runs" / "quickstart" / "checked").until_step(1)
