"""Profiling a foreign script: a step there ends when its optimizer has stepped.

Imported by `profiled_script/sitecustomize.py` in the ranks of `gradus train --profile ... -- script.py`, and nowhere
else. Of several optimizers the one that steps first counts.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradus.record.directory import RunDirectory
from gradus.record.variables import ATTEMPT, RUN
from gradus.training.profiling import Profiling, events_of, requested


class _ScriptSteps:
    """Counts the steps of a script, and records some of them."""

    def __init__(self, run: RunDirectory, attempt: int, rank: int, world_size: int) -> None:
        self._run, self._attempt, self._rank, self._world_size = run, attempt, rank, world_size
        self._request = requested(run, attempt)
        self._profiling: Profiling | None = None
        self._counted: int | None = None  # the id of the optimizer
        self._pid = os.getpid()
        self._hook: Any = None
        self.done = 0

    def begin(self) -> None:
        if self._request is None or not self._request.wants(self._rank, self._world_size):
            return
        self._hook = register_optimizer_step_post_hook(self._stepped)
        atexit.register(self.end)

    def _stepped(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        if os.getpid() != self._pid:
            return
        self._counted = self._counted or id(optimizer)
        if id(optimizer) != self._counted:
            return
        self.done += 1
        if self._profiling is None:
            self._profiling = self._made()
        self._profiling.at(self.done)

    def _made(self) -> Profiling:
        assert self._request is not None
        window = self._request.window(0, None)
        assert window is not None
        used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.device("cuda" if used else "cpu")
        return Profiling(
            self._request,
            range(max(window[0], 2), max(window[-1], 2) + 1),  # where the first step begins, nobody knows
            self._run.path / "traces",
            attempt=self._attempt,
            rank=self._rank,
            world_size=self._world_size,
            device=device,
            tell=events_of(self._run, self._attempt, self._rank),
        )

    def end(self) -> None:
        """The script ends, or steps are counted by somebody else."""
        if self._hook is None or os.getpid() != self._pid:
            return
        self._hook.remove()
        self._hook = None
        if self._profiling is not None:
            self._profiling.close()
        elif self._request is not None and self.done == 0:
            tell = events_of(self._run, self._attempt, self._rank)
            tell({"message": "profile: no optimizer of torch.optim has stepped: nothing was recorded"})

    def give_way(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


_steps: list[_ScriptSteps] = []


def begin() -> None:
    """In a rank, as soon as torch's optimizers are there."""
    run = RunDirectory(Path(os.environ[RUN]))
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    steps = _ScriptSteps(run, int(os.environ[ATTEMPT]), rank, world_size)
    _steps.append(steps)
    steps.begin()


def give_way() -> None:
    """An own loop has its own steps."""
    for steps in _steps:
        steps.give_way()
