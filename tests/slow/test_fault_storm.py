"""A storm of stops and kills: whatever happens to a run, its curve is the undisturbed one, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradus.launcher.node_ranks import RANK_MODULE
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.record.status import read_status

RECIPE = {
    "name": "storm",
    "model": {"use": "gpt", "layers": 2, "width": 64, "heads": 4, "context": 64, "dropout": 0.1},
    "data": {"use": "stdlib-text", "max_bytes": 400_000},
    "batch": 12,
    "steps": 1000,
    "optimizer": {"use": "adamw", "lr": 1e-3, "warmup": 20, "decay": "cosine", "clip": 1.0},
    "evaluate": {"every": 100, "batches": 4},
    "checkpoint": {"every": 10},
    "deterministic": True,
}
DISTURBANCES = 6
COMPARED = ("loss", "grad_norm", "lr", "samples", "validation_loss", "validation_accuracy")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gradus", "train", *arguments, "--nproc", "3", "--json", "--runs", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def ranks_of(run: RunDirectory) -> list[int]:
    """Process ids of the run's ranks, by what they were started as."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if RANK_MODULE in words and str(run.path) in words and "torch.distributed.run" not in words:
                found.append(int(entry.name))
    return found


def disturb(kind: str, launcher: subprocess.Popen[str], run: RunDirectory) -> None:
    if kind == "stop":
        launcher.send_signal(signal.SIGTERM)
    elif kind == "kill-launcher":
        launcher.kill()
    elif ranks := ranks_of(run):
        os.kill(random.choice(ranks), signal.SIGKILL)


def step_of(run: RunDirectory) -> int:
    """The last step that the run has logged, whoever trained it."""
    rows = read_metrics(run) if run.path.exists() else []
    return int(rows[-1]["step"]) if rows else 0


def facts(run: RunDirectory) -> list[dict[str, Any]]:
    return [{key: row[key] for key in ("step", *COMPARED) if key in row} for row in read_metrics(run)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_that_is_stopped_and_killed_again_and_again_ends_as_if_nothing_had_happened(
    tmp_path: Path, seed: int
) -> None:
    random.seed(seed)
    recipe = tmp_path / "storm.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    undisturbed = start(tmp_path, str(recipe), "--run-id", "undisturbed")
    assert undisturbed.wait() == 0
    expected = facts(RunDirectory(tmp_path / "storm" / "undisturbed"))
    assert len(expected) == RECIPE["steps"]

    run = RunDirectory(tmp_path / "storm" / "disturbed")
    launcher = start(tmp_path, str(recipe), "--run-id", "disturbed")
    disturbances: list[str] = []
    for _ in range(40):
        kind = random.choice(["stop", "kill-rank", "kill-launcher"])
        begin, steps = step_of(run), random.randint(1, 30)
        while step_of(run) < begin + steps and launcher.poll() is None:
            time.sleep(0.05)
        if launcher.poll() is None and len(disturbances) < DISTURBANCES:
            disturb(kind, launcher, run)
            disturbances.append(kind)
        code = launcher.wait()
        if code == 0:
            break
        while ranks_of(run):  # a killed launcher takes its ranks along, but not in no time
            time.sleep(0.1)
        launcher = start(tmp_path, "--resume", str(run.path))
    assert launcher.returncode == 0
    assert json.loads(launcher.stdout.read())["state"] == "finished"  # type: ignore[union-attr]
    status = read_status(run)
    assert status is not None
    assert status.state == "finished"
    assert len(disturbances) == DISTURBANCES
    assert facts(run) == expected
