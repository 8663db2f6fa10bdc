"""Runs that are submitted to a lab, with a model that can be told to misbehave, and what became of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from gradus_command import Done, committed, events, lines, rank_processes, status
from slurm.lab import Lab, LabError

from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics

PATIENCE_SECONDS = 300.0  # for what must happen at all, on a machine with other work
COMPARED = ("step", "loss", "grad_norm", "lr", "samples")

USER_FILE = '''\
"""A model that takes its time and does, in one step of one rank, what MISBEHAVE says: `kind:step:rank-or-node`."""

import os
import time

import torch
from torch import nn


def once():
    """Whether this is the first time, where it is to happen only once."""
    mark = os.environ.get("ONCE")
    if mark is None:
        return True
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.kind, self.at, self.who = (os.environ.get("MISBEHAVE", "::") + "::").split(":")[:3]

    def forward(self, x, y):
        if self.training:
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
            self.misbehave(int(x[0, -1].item()))
        return ((self.layers(x[:, :4].to(self.layers[0].weight.dtype)) - y) ** 2).mean()

    def misbehave(self, step):
        here = (os.environ.get("RANK", "0"), os.environ.get("SLURMD_NODENAME", ""))
        if not self.kind or self.who not in here:
            return
        if self.kind == "slow" and step >= int(self.at):
            once()
            time.sleep(2 * float(os.environ["STEP_SECONDS"]))
        elif step == int(self.at) and once():
            if self.kind == "hang":
                time.sleep(1e6)
            if self.kind == "crash":
                raise ValueError("the cat is on the keyboard")


class Data(torch.utils.data.Dataset):
    """In their order, so that a sample knows the step that it is in."""

    def __init__(self, batch=8, length=100_000, nan_at=None):
        self.batch, self.length, self.nan_at = batch, length, nan_at

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        x = torch.sin(torch.arange(5, dtype=torch.float64) * (1 + index % 97))
        if index == self.nan_at:
            x[0] = float("nan")
        target = x[:1].clone()
        x[4] = index // self.batch
        return x, target
'''

RECIPE: dict[str, Any] = {
    "name": "own",
    "model": {"use": "own.py:Model"},
    "data": {"use": "own.py:Data", "shuffle": "none", "validation": 0},
    "batch": 8,
    "steps": 40,
    "optimizer": {"lr": 1e-2, "clip": 1.0},
    "checkpoint": {"every": 5},
    "log_every": 1,
    "deterministic": True,
    "plan": {
        "workers": 0,
        "precision": "fp64",
        "compile": False,
        "mesh": {"replicate": 4},
        "zero": 0,
        "micro_batch": 2,
    },
}


class Jobs:
    """`gradus` in a folder of its own, in the environment of a lab."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder, self.runs = lab, folder, folder / "runs"
        (folder / "own.py").write_text(USER_FILE)
        # Without GPUs the planner is not asked, which takes a while; what has to do with them uses the lab's own file.
        described = yaml.safe_load(lab.cluster_file.read_text())
        plain = {key: value for key, value in described.items() if key not in ("gpus_per_node", "gpu")}
        self.cluster = folder / "cluster.yaml"
        self.cluster.write_text(yaml.safe_dump(plain))

    def recipe(self, **changes: Any) -> str:
        (self.folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **changes}, sort_keys=False))
        return "recipe.yaml"

    def gradus(self, *arguments: str, timeout: float = PATIENCE_SECONDS, **environment: str) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "gradus", *arguments],
            cwd=self.folder,
            # A queue that an earlier test has asked for is not this test's.
            env={
                **self.lab.environment,
                "OMP_NUM_THREADS": "1",
                "XDG_CACHE_HOME": str(self.folder / "cache"),
                **environment,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def submit(self, recipe: str, *options: str, nodes: int = 2, ranks: int = 2, **environment: str) -> Run:
        done = self.gradus(
            *("submit", recipe, "--cluster", str(self.cluster), "--nodes", str(nodes), "--nproc", str(ranks)),
            *("--json", *options),
            **environment,
        )
        assert done.code == 0, f"{done.code}: {done.out}{done.err}"
        return Run(self.lab, Path(done.json["run"]))

    def undisturbed(self, recipe: str, ranks: int) -> list[dict[str, Any]]:
        """The curve of the same recipe on this machine, without a scheduler and without trouble."""
        done = self.gradus("train", recipe, "--nproc", str(ranks), "--here", "--json", "--run-id", f"calm-{ranks}")
        assert done.code == 0, done.err
        return curve(Path(done.json["run"]))


class Run:
    """A run that was submitted."""

    def __init__(self, lab: Lab, path: Path) -> None:
        self.lab, self.path = lab, path

    @property
    def job_ids(self) -> list[str]:
        return [str(line["job_id"]) for line in lines(self.path / "job" / "jobs.jsonl")]

    @property
    def curve(self) -> list[dict[str, Any]]:
        return curve(self.path)

    @property
    def status(self) -> dict[str, Any]:
        return status(self.path)

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return lines(self.path / "control" / "ledger.jsonl")

    @property
    def decisions(self) -> list[str]:
        return [line["decision"] for line in self.ledger]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in events(self.path) if event["event"] == kind]

    @property
    def saved(self) -> list[int]:
        return committed(self.path)

    @property
    def ranks(self) -> dict[int, int]:
        return rank_processes(self.path)

    def output(self) -> str:
        """What the batch shells, the nodes and their ranks printed: for the message of a test that fails."""
        texts = [f"== {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.path.glob("job/*.out"))]
        logs = sorted(self.path.glob("attempts/*/logs/*.log"))
        texts += [f"== {path.relative_to(self.path)}\n{path.read_text(errors='replace')[-3000:]}" for path in logs]
        return "\n".join([*texts, json.dumps(self.ledger, indent=1)])

    def until(self, what: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
        """What the function returns, once that is true; a job that has ended before is a failure."""
        give_up_at = time.monotonic() + seconds
        ask_queue_at = 0.0
        while time.monotonic() < give_up_at:
            if found := what():
                return found
            if time.monotonic() > ask_queue_at:
                if not self.in_queue() and not what():
                    raise AssertionError(f"the job ended before\n{self.output()}")
                ask_queue_at = time.monotonic() + 2
            time.sleep(0.1)
        raise AssertionError(f"not true after {seconds} s\n{self.output()}")

    def until_step(self, step: int, seconds: float = PATIENCE_SECONDS) -> None:
        self.until(lambda: self.curve and self.curve[-1]["step"] >= step, seconds)

    def in_queue(self) -> str:
        """The states of the run's jobs that Slurm still has something to do with; `unknown` while nobody answers."""
        ids = ",".join(self.job_ids)
        try:
            return self.lab.run("squeue", "--noheader", "--format=%i %T %r", f"--jobs={ids}", timeout=15).strip()
        except subprocess.TimeoutExpired:
            return "unknown"
        except LabError as error:  # a job that ended long ago is an unknown one: only that is an answer
            return "" if "Invalid job id" in str(error) else "unknown"

    def ended(self, seconds: float = PATIENCE_SECONDS) -> str:
        """Wait until no job of the run is left in the queue; the state that the run then has."""
        give_up_at = time.monotonic() + seconds
        while self.in_queue():
            assert time.monotonic() < give_up_at, f"still in the queue: {self.in_queue()}\n{self.output()}"
            time.sleep(0.3)
        return str(self.status.get("state"))

    def finished(self, seconds: float = PATIENCE_SECONDS) -> list[dict[str, Any]]:
        """Wait for its end, which must be a good one; its curve."""
        state = self.ended(seconds)
        assert state == "finished", f"{state}\n{self.output()}"
        return self.curve


def curve(run: Path) -> list[dict[str, Any]]:
    """What each step computed, and nothing of how long it took."""
    rows = [row for row in read_metrics(RunDirectory(run)) if row.get("loss") is not None]
    return [{name: row.get(name) for name in COMPARED} for row in rows]


def node_of(process: int) -> str:
    """The node of the lab that a process runs on."""
    variables = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    return next(value.removeprefix("SLURMD_NODENAME=") for value in variables if value.startswith("SLURMD_NODENAME="))


def kill(process: int) -> None:
    os.kill(process, 9)
