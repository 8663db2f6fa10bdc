"""Small recipes of every kind of reference model, and how the pool's processes train them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pool import Pool
from torch.distributed.tensor import DTensor

from gradus.parallel.world import World
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.record.stop import request_stop
from gradus.schema.cluster import Cluster
from gradus.schema.recipe import Recipe
from gradus.training.live_run import LiveRun
from gradus.training.loop import train

CLUSTER = Cluster(name="test", cpu_cores=1, memory_gib=8.0)
STEPS = 20
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "model": {"use": "gpt", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 32},
        "data": {"use": "stdlib-text", "max_bytes": 200_000},
        "batch": 24,  # so that it can be split over 4 ranks and 2 accumulation steps
        "optimizer": {"use": "adamw", "lr": 3e-3, "warmup": 5, "decay": "cosine", "weight_decay": 0.1, "clip": 1.0},
    },
    "simple-cnn": {
        "model": {"use": "simple-cnn"},
        "data": {"use": "synthetic-images", "size": 32, "samples": 200},
        "optimizer": {"use": "sgd", "lr": 0.02, "momentum": 0.9},
    },
    "resnet18": {
        "model": {"use": "resnet18", "classes": 10, "small_input": True},
        "data": {"use": "synthetic-images", "size": 16, "samples": 200},
        "optimizer": {"use": "sgd", "lr": 0.02, "momentum": 0.9},
    },
}


def recipe_for(case: str, /, **changes: Any) -> Recipe:
    document = {"name": "parity", "batch": 12, "steps": STEPS, "seed": 7, **MODELS[case], **changes}
    return resolved(Recipe.from_document(document))


def trained(
    world: World, folder: str, recipe: Recipe, attempt: int = 1, stop_step: int | None = None
) -> dict[str, Any]:
    """Train in this process's part of the world; how it ended and, from rank 0, the weights."""
    live = live_run(world, folder, recipe, attempt, stop_step)
    ending = train(live)
    live.recorder.close(state=ending.state)
    weights = whole_weights(live)
    return {"state": ending.state, "reason": ending.reason, "step": live.state.step, "weights": weights}


def live_run(world: World, folder: str, recipe: Recipe, attempt: int = 1, stop_step: int | None = None) -> LiveRun:
    """This process's part of a run with the usual plan, which may be asked to stop at a step."""
    plan = default_plan(recipe, CLUSTER, world.size).plan
    live = LiveRun.from_recipe(recipe, plan, RunDirectory(Path(folder)), attempt, world)
    if stop_step is not None:
        stopped_at(live, stop_step)
    return live


def whole_weights(live: LiveRun) -> dict[str, torch.Tensor]:
    """Weights and buffers by name, put together from the parts that ranks hold."""
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in live.model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        weights[name] = whole.detach().clone()
    if live.world.mesh.pipeline == 1:
        return weights
    stages: list[dict[str, torch.Tensor]] = [{} for _ in range(live.world.size)]
    dist.all_gather_object(stages, weights)
    return {name: weight for stage in stages for name, weight in stage.items()}


@dataclass(frozen=True)
class Trained:
    rows: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    run: RunDirectory


def run_on(pool: Pool, ranks: int, folder: Path, recipe: Recipe) -> Trained:
    """A whole run on so many ranks of the pool. All of them end with the same weights."""
    run = RunDirectory.create(folder, recipe.name)
    results = pool.run(ranks, trained, str(run.path), recipe)
    return Trained(read_metrics(run), same_weights(results), run)


def same_weights(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    first: dict[str, torch.Tensor] = results[0]["weights"]
    for other in results[1:]:
        assert all(torch.equal(weight, other["weights"][name]) for name, weight in first.items())
    return first


def stopped_at(live: LiveRun, step: int) -> None:
    """Arrange for a real stop request, a file in the control folder, to appear when the run reaches `step`."""
    schedule = live.schedule
    live.stop.look_every_seconds = 0.0

    def watched(position: int) -> float:
        if live.world.leads and live.state.step == step:
            request_stop(live.run, "test")
        return schedule(position)

    live.schedule = watched
