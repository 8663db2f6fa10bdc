"""Hooks as users write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradus
from gradus.training.hooks import HookRun


class Diary(gradus.Hook):
    """Writes down every moment, with the rank it was on."""

    def __init__(self, file: str = "diary.jsonl") -> None:
        self.file = file

    def note(self, run: HookRun, moment: str, **more: Any) -> None:
        line = {"moment": moment, "rank": run.rank, "ranks": run.ranks, "step": run.step, "of": run.total_steps, **more}
        with (run.directory / self.file).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_start(self, run: HookRun) -> None:
        self.note(run, "start")

    def on_step(self, run: HookRun) -> None:
        self.note(run, "step", loss=run.loss)
        run.log(twice=2.0 * run.step)

    def on_evaluate(self, run: HookRun, results: dict[str, float]) -> None:
        self.note(run, "evaluate", loss=results["loss"])

    def on_checkpoint(self, run: HookRun, path: Path) -> None:
        self.note(run, "checkpoint", committed=(path / "COMMITTED").exists(), name=path.name)

    def on_end(self, run: HookRun, state: str, reason: str) -> None:
        self.note(run, "end", state=state, reason=reason)


class DiaryOfAll(Diary):
    every_rank = True


class Counting(gradus.Hook):
    """Keeps a number in checkpoints."""

    def __init__(self) -> None:
        self.count = torch.zeros(1)

    def on_step(self, run: HookRun) -> None:
        self.count += 1
        run.log(counted=self.count.item())

    def state(self) -> dict[str, Tensor]:
        return {"count": self.count}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.count = state["count"].clone()


class Broken(gradus.Hook):
    def on_step(self, run: HookRun) -> None:
        if run.step == 3:
            raise ValueError("what a pity")


class MeasuresAlone(gradus.Hook):
    def on_evaluate(self, run: HookRun, results: dict[str, float]) -> None:
        run.evaluate_with({}, "other")


class NotAHook:
    def on_step(self, run: HookRun) -> None:
        pass
