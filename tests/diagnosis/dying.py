"""Faults of learning, of the user's own code and of dying, planted in real runs; each with its clean twin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent / "faulty"

SOUND: dict[str, Any] = {
    "name": "learns",
    "model": {"use": f"{HERE / 'learning.py'}:Learner"},
    "data": {"use": f"{HERE / 'learning.py'}:Noisy", "length": 512, "noise": 0.1},
    "loss": "mse",
    "batch": 8,
    "steps": 40,
    "optimizer": {"use": "adamw", "lr": 1e-3},
    "evaluate": {"every": 8},
    "plan": {"workers": 0},
}


@dataclass(frozen=True)
class Case:
    """A recipe with a fault in it, or a script with its arguments; `mended` makes the clean twin of it."""

    name: str
    finding: str
    wrong: dict[str, Any] | tuple[str, ...]
    mended: dict[str, Any] | tuple[str, ...]
    nproc: int = 1
    dies: bool = False
    evidence: dict[str, Any] = field(default_factory=dict)  # that the finding must have


RECIPES = (
    Case(
        "learns-by-heart",
        "overfitting",
        {"data.length": 64, "data.noise": 2.0, "steps": 80, "optimizer.lr": 5e-3},
        {"data.length": 512, "data.noise": 0.1, "optimizer.lr": 1e-3},
    ),
    Case(
        "too-large-steps",
        "diverged",
        {"optimizer": {"use": "adamw", "lr": 0.2, "lr_batch": 1, "lr_scaling": "linear"}},
        {"optimizer": {"use": "adamw", "lr": 1e-3}},
    ),
    Case(
        "too-large-steps-to-infinity",
        "diverged",
        {"optimizer": {"use": "sgd", "lr": 0.5, "lr_batch": 1, "lr_scaling": "linear"}},
        {"optimizer": {"use": "sgd", "lr": 0.01}},
        dies=True,
    ),
    Case(
        "not-a-number-in-fp16",
        "nan",
        {"model.dies": "nan", "model.at": 5, "plan.precision": "fp16"},
        {"model.dies": None},
        dies=True,
    ),
    Case("out-of-memory", "out-of-memory", {"model.dies": "memory"}, {"model.dies": None}, dies=True),
    Case(
        "hangs",
        "collective-timeout",
        {
            "model.dies": "hang",
            "model.at": 20,
            "model.on_rank": 1,
            "watchdog": {"after": 2, "at_least": "4s", "starting": "60s"},
        },
        {"model.dies": None, "watchdog": {"after": 2, "at_least": "5m", "starting": "5m"}},
        nproc=2,
        dies=True,
        evidence={"rank": 1},
    ),
)
SCRIPTS = (
    Case("item-in-loop", "host-sync", ("item_in_loop.py",), ("item_after_loop.py",)),
    Case("prints-each-step", "host-sync", ("prints_each_step.py",), ("prints_now_and_then.py",)),
    Case("no-process-group", "no-process-group", ("dies.py", "no-process-group"), ("dies.py", "no"), 2, True),
    Case(
        "module-missing-on-one-rank",
        "import-error",
        ("dies.py", "missing-module"),
        ("dies.py", "no"),
        2,
        True,
        {"ranks": [1], "module": "no_such_module_anywhere"},
    ),
    Case(
        *("collective-without-one-rank", "collective-timeout", ("dies.py", "hang"), ("dies.py", "no"), 2, True),
        {"absent_ranks": [1], "its_last_line": "rank 1 writes its results"},
    ),
    Case("no-host-memory", "out-of-memory", ("dies.py", "host-memory"), ("dies.py", "no"), 2, True),
    Case("raises", "crash", ("dies.py", "crash"), ("dies.py", "no"), 2, True),
)


def run_case(case: Case, folder: Path, *, clean: bool) -> Path:
    """The run directory of a case, or of its clean twin."""
    command = [sys.executable, "-m", "gradus", "train", "--nproc", str(case.nproc), "--run-id", "x"]
    if isinstance(case.wrong, tuple):
        typed = case.mended if clean else case.wrong
        assert isinstance(typed, tuple)
        command += ["--", str(HERE / typed[0]), *typed[1:]]
        name = Path(typed[0]).stem
    else:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(_recipe(case, clean=clean)))
        command += [str(folder / "recipe.yaml")]
        name = "learns"
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode != 0) == (case.dies and not clean), done.stdout + done.stderr
    return folder / "runs" / name / "x"


def killed_run(folder: Path) -> Path:
    """A run whose launcher was killed in the middle, with all that it had started."""
    document = {**json.loads(json.dumps(SOUND)), "steps": 100_000}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(document))
    process = subprocess.Popen(
        [sys.executable, "-m", "gradus", "train", str(folder / "recipe.yaml"), "--run-id", "x"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = folder / "runs" / "learns" / "x"
    try:
        deadline = time.monotonic() + 240
        while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").stat().st_size == 0:
            assert process.poll() is None, "it ended before it trained"
            assert time.monotonic() < deadline, "it never began to train"
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    writer = json.loads((run / "status.json").read_text())["pid"]
    deadline = time.monotonic() + 60
    while Path(f"/proc/{writer}").exists() and time.monotonic() < deadline:  # ranks end with their launcher
        time.sleep(0.1)
    return run


def _recipe(case: Case, *, clean: bool) -> dict[str, Any]:
    document = json.loads(json.dumps(SOUND))
    assert isinstance(case.wrong, dict)
    assert isinstance(case.mended, dict)
    for key, value in {**case.wrong, **(case.mended if clean else {})}.items():
        *outer, last = key.split(".")
        block = document
        for name in outer:
            block = block[name]
        block[last] = value
    return document
