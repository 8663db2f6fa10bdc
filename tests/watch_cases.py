"""What the pool's processes do in tests of the watch over a run, and the user's code that is slow there."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from training_cases import CLUSTER

from gradus.faults.watcher import Rhythm
from gradus.parallel.world import World
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.schema.recipe import Recipe
from gradus.training.live_run import LiveRun
from gradus.training.loop import train

SLOW_FILE = '''\
"""A user's model, data and hook; on rank 1 one of them takes its time, as the recipe says."""

import time

import torch
import torch.distributed as dist
from torch import nn

import gradus


def dawdle(seconds):
    if seconds and dist.get_rank() == 1:
        time.sleep(seconds)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        dawdle(ctx.seconds)
        return gradient, None


class Model(nn.Module):
    def __init__(self, forward=0.0, backward=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.slow = (forward, backward)

    def forward(self, x, y):
        if self.training:
            dawdle(self.slow[0])
        return ((self.second(SlowBackward.apply(self.first(x), self.slow[1])) - y) ** 2).mean()


class Data:
    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def __len__(self):
        return 64

    def __getitem__(self, index):
        dawdle(self.seconds)
        x = torch.full((4,), index / 64)
        return x, x[:1]


class Hook(gradus.Hook):
    every_rank = True

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def on_step(self, run):
        dawdle(self.seconds)
'''


def slow_recipe(folder: Path, *, steps: int = 12, **seconds: float) -> Recipe:
    """Rank 1 sleeps so many seconds in a step: in `forward`, `backward`, `hook`, or for each of two samples, `data`."""
    file = folder / "slow.py"
    file.write_text(SLOW_FILE)
    document: dict[str, Any] = {
        "name": "slow",
        "model": {"use": f"{file}:Model", **{k: v for k, v in seconds.items() if k in ("forward", "backward")}},
        "data": {"use": f"{file}:Data", "seconds": seconds.get("data", 0.0)},
        "hooks": [{"use": f"{file}:Hook", "seconds": seconds.get("hook", 0.0)}],
        "batch": 4,
        "steps": steps,
        "evaluate": {"batches": 1},
        "optimizer": {"lr": 1e-3},
        "plan": {"workers": 0},
    }
    return resolved(Recipe.from_document(document))


def own_times(world: World, folder: str, recipe: Recipe) -> dict[str, Any]:
    """Train, with reports often enough that short runs have some; medians of a step of this rank."""
    plan = default_plan(recipe, CLUSTER, world.size).plan
    often = Rhythm(report_seconds=0.05, health_seconds=0.05)
    with patch.object(Rhythm, "for_patience", return_value=often):
        live = LiveRun.from_recipe(recipe, plan, RunDirectory(Path(folder)), 1, world)
    train(live)
    live.watch.own.settle()
    own = live.watch.own.seconds()
    assert own is not None
    step = median(live.watch.where.step_seconds)
    time.sleep(0.2)  # for one more report, and one that reads it
    live.recorder.close(state="finished")
    return {"work": own.work, "data": own.data, "step": step}
