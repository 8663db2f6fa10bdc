"""Hooks as users write them."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from training_cases import trained

import gradus
from gradus.checkpoint import job
from gradus.parallel.world import World
from gradus.schema.recipe import Recipe
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


class KeepsText(gradus.Hook):
    def state(self) -> Any:
        return {"text": "abc"}


class WaitsForEpochs(gradus.Hook):
    def on_epoch(self, run: HookRun) -> None:
        pass


class KeepsNumbers(gradus.Hook):
    def __init__(self) -> None:
        self.calls = 0

    def on_step(self, run: HookRun) -> None:
        self.calls += 1
        run.log(calls=self.calls)

    def state(self) -> dict[str, float]:
        return {"calls": self.calls}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.calls = int(state["calls"])


class Broken(gradus.Hook):
    def on_step(self, run: HookRun) -> None:
        if run.step == 3:
            raise ValueError("what a pity")


class MeasuresAlone(gradus.Hook):
    def on_evaluate(self, run: HookRun, results: dict[str, float]) -> None:
        run.evaluate_with({}, "other")


@dataclass
class Written(gradus.Hook):
    """A dataclass, which has no hash."""

    file: str = "written.txt"

    def on_end(self, run: HookRun, state: str, reason: str) -> None:
        (run.directory / self.file).write_text(state)


class TalksAtCheckpoints(gradus.Hook):
    """Ranks that do not all come here would wait for each other."""

    every_rank = True

    def on_checkpoint(self, run: HookRun, path: Path) -> None:
        if run.ranks > 1:
            dist.barrier()


class NotAHook:
    def on_step(self, run: HookRun) -> None:
        pass


def trained_with_a_full_disk_at(world: World, folder: str, recipe: Recipe, step: int) -> dict[str, Any]:
    """Run by the pool, of a recipe whose ranks write themselves: rank 0 cannot write the checkpoint of one step."""
    write = job.write_part

    def full(path: Path, *arguments: Any, **more: Any) -> Any:
        if world.leads and path.name == f"step-{step:08d}":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *arguments, **more)

    job.write_part = full
    try:
        return trained(world, folder, recipe)
    finally:
        job.write_part = write
