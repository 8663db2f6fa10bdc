"""What the pool's processes do in tests of measured memory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from training_cases import CLUSTER

from gradus.parallel.world import World
from gradus.planner.defaults import default_plan
from gradus.record.directory import RunDirectory
from gradus.schema.recipe import Recipe
from gradus.training.live_run import LiveRun
from gradus.training.memory import memory_of


def measured(world: World, folder: str, recipe: Recipe) -> dict[str, dict[str, int]]:
    """Bytes of this rank at four moments of the second step, which has two micro-batches."""
    plan = default_plan(recipe, CLUSTER, world.size).plan
    live = LiveRun.from_recipe(recipe, plan, RunDirectory(Path(folder)), 1, world)
    found: dict[str, dict[str, int]] = {}

    def measure(moment: str) -> None:
        found[moment] = asdict(memory_of(live.step.model, live.optimizer))

    def forward_is_done(*_: Any) -> None:
        if not live.step.under_way:
            measure("first forward")

    batches = live.loader.micro_batches(0, 2)
    live.step.run(batches, 0, 1e-3, measure_norm=False)
    live.model.register_forward_hook(forward_is_done)
    backward = live.step.backward

    def backward_then_measure(*losses: Any) -> None:
        backward(*losses)
        measure("last backward" if live.step.complete else "first backward")

    live.step.backward = backward_then_measure  # type: ignore[method-assign]
    live.step.run(batches, 1, 1e-3, measure_norm=False)
    measure("between steps")
    live.recorder.close(state="finished")
    return found
