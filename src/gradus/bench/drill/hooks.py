"""A hook that puts a NaN into a weight of one rank: what a broken chip, or a learning rate too high, does."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from gradus.training.hooks import Hook, HookRun


class PutNan(Hook):
    """Once, after a step, in the first weight that this rank holds. `mark` is the file that remembers it."""

    every_rank = True

    def __init__(self, after_step: int, rank: int, mark: str) -> None:
        self._after_step, self._rank, self._mark = after_step, rank, Path(mark)

    def on_step(self, run: HookRun) -> None:
        if run.step != self._after_step or int(os.environ.get("RANK", "0")) != self._rank or self._mark.exists():
            return
        self._mark.touch()
        weight = next(run.model.parameters()).detach()
        whole = weight.to_local() if hasattr(weight, "to_local") else weight
        with torch.no_grad():
            whole.view(-1)[0] = float("nan")
