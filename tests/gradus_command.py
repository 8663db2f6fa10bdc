"""The real `gradus` command in a folder of its own, and a user's model and data that can be made to misbehave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CANARY = "canary-6f1d"

USER_FILE = '''\
"""A user's own file: each model and dataset misbehaves in one way, as the environment says."""

import os
import time
from pathlib import Path

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.steps = 0
        if "NOTE_PID" in os.environ:
            Path(os.environ["NOTE_PID"]).write_text(str(os.getpid()))

    def forward(self, x, y):
        if self.training:
            self.steps += 1
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
            if os.environ.get("RAISE_ON_RANK") == os.environ.get("RANK", "0") and self.steps == 3:
                raise ValueError("the cat is on the keyboard")
        else:
            time.sleep(float(os.environ.get("EVALUATION_SECONDS", "0")))
            if "NOTE_EVALUATED" in os.environ:
                with open(os.environ["NOTE_EVALUATED"] + os.environ.get("RANK", "0"), "a") as notes:
                    notes.write("x")
        return ((self.layer(x) - y) ** 2).mean()


def broken_model(width):
    table = {"a": 1}
    return nn.Linear(width, table["missing"])


def says(text):
    print(text)
    return Model()


class Data:
    def __init__(self, length=64, nan_at=None):
        self.length, self.nan_at = length, nan_at

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        x = torch.full((4,), index / 64)
        if index == self.nan_at:
            x[0] = float("nan")
        return x, x[:1]
'''

RECIPE: dict[str, Any] = {
    "name": "own",
    "model": {"use": "own.py:Model"},
    "data": {"use": "own.py:Data"},
    "batch": 8,
    "steps": 6,
    "optimizer": {"lr": 1e-3},
    "plan": {"workers": 0},
}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout; nothing may be around it."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        return json.loads(self.out, parse_constant=refuse)


class Gradus:
    """`gradus` in a folder with the user's file `own.py`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self._started: list[subprocess.Popen[str]] = []
        (folder / "own.py").write_text(USER_FILE)

    def recipe(self, file: str = "recipe.yaml", **changes: Any) -> str:
        (self.folder / file).write_text(yaml.safe_dump({**RECIPE, **changes}, sort_keys=False))
        return file

    def __call__(self, *arguments: str, timeout: float = 120, **environment: str) -> Done:
        process = self.start(*arguments, **environment)
        return self.end(process, timeout)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "gradus", *arguments],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "FAKE_SECRET_TOKEN": CANARY, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def end(self, process: subprocess.Popen[str], timeout: float = 120) -> Done:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"no end after {timeout} s\n{out}\n{err}") from None
        return Done(process.returncode, out, err)

    def stop_all(self) -> None:
        """End what a failed test left behind; ranks end with their launcher."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def run(self, run_id: str, name: str = "own") -> Path:
        return self.runs / name / run_id


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file that may be growing or not be there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def trained(run: Path) -> list[dict[str, Any]]:
    return [row for row in lines(run / "metrics.jsonl") if "loss" in row]


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text()) if (run / "status.json").exists() else {}


def events(run: Path) -> list[dict[str, Any]]:
    return [event for path in sorted((run / "events").glob("*.jsonl")) for event in lines(path)]


def committed(run: Path) -> list[int]:
    names = (path.parent.name.removeprefix("step-") for path in run.glob("checkpoints/step-*/COMMITTED"))
    return sorted(int(name) for name in names if name.isdecimal())  # others were set aside


def rank_processes(run: Path) -> dict[int, int]:
    """Rank -> process id of the ranks of a run that are alive."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text(errors="replace").split("\0")
            variables = (process / "environ").read_text(errors="replace").split("\0")
        except OSError:  # it has just ended
            continue
        rank = next((v.removeprefix("RANK=") for v in variables if v.startswith("RANK=")), None)
        if str(run) in command and rank is not None:
            found[int(rank)] = int(process.name)
    return found


def wait_until(what: Callable[[], Any], process: subprocess.Popen[str] | None = None, seconds: float = 120) -> Any:
    """What the function returns, once that is true; a process that ends before is a failure with its output."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode} before\n{process.communicate()}")
        time.sleep(0.05)
    raise AssertionError(f"not true after {seconds} s")


def python(gradus: Gradus, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A script of the user's, started without gradus."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=gradus.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, and what it said on stdout and stderr."""
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def only_run(gradus: Gradus, name: str, before: set[Path]) -> Path:
    """The one that was not there before."""
    [run] = set((gradus.runs / name).glob("*")) - before
    return run
