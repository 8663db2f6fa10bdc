"""Small recipes of every kind of reference model, and how the pool's processes train them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pool import Pool

from gradus.parallel.world import World
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
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


def recipe_for(model: str, **changes: Any) -> Recipe:
    document = {"name": "parity", "batch": 12, "steps": STEPS, "seed": 7, **MODELS[model], **changes}
    return resolved(Recipe.from_document(document))


def trained(world: World, folder: str, recipe: Recipe) -> dict[str, Any]:
    """Train in this process's part of the world; the curve and the weights."""
    plan = default_plan(recipe, CLUSTER, world.size).plan
    live = LiveRun(recipe, plan, RunDirectory(Path(folder)), 1, world)
    ending = train(live)
    live.recorder.close(state=ending.state)
    weights = {name: tensor.double() for name, tensor in live.model.state_dict().items()}
    return {"ending": ending.state, "weights": weights if world.leads else None, "step": live.state.step}


def run_on(pool: Pool, ranks: int, folder: Path, recipe: Recipe) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    run = RunDirectory.create(folder, recipe.name, f"ranks-{ranks}-{recipe.plan.accumulate}")
    results = pool.run(ranks, trained, str(run.path), recipe)
    return read_metrics(run), results[0]["weights"]
