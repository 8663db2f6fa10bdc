"""What the pool's processes do in tests of fp8."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from recompute_cases import text, whole
from training_cases import recipe_for

from gradus.models import catalogue
from gradus.parallel.shard import shard
from gradus.parallel.world import World
from gradus.record.directory import RunDirectory
from gradus.schema.plan import Mesh, Plan
from gradus.training import float8, live_run
from gradus.training.float8 import Float8Linear, apply_float8
from gradus.training.precision import numbers_for


def gradients_of_shards_in_fp8(world: World) -> dict[str, Any]:
    """How far gradients of sharded fp8 layers are from those of one process with bf16 weights."""
    plan = Plan(mesh=Mesh(shard=world.size), zero=3, precision="fp8")
    settings = {"layers": 2, "width": 256, "heads": 4, "context": 12}
    torch.manual_seed(1)
    model = catalogue.build("gpt", settings)
    apply_float8(model, plan, torch.device("cpu"))
    alone = copy.deepcopy(model).bfloat16()
    gathered: set[torch.dtype] = set()
    for layer in model.modules():
        if isinstance(layer, Float8Linear):
            layer.register_forward_hook(lambda layer, inputs, output: gathered.add(layer.weight.dtype))
    shard(model, world.arranged(plan.mesh), plan, torch.bfloat16)
    for each in (model, alone):
        with torch.autocast("cpu", torch.bfloat16):
            each(*text()).loss_sum.backward()
    deviations = {
        name: float((whole(p.grad) - expected.grad).norm() / expected.grad.norm())  # type: ignore[union-attr,operator,arg-type]
        for (name, p), expected in zip(model.named_parameters(), alone.parameters(), strict=True)
    }
    return {"gathered": gathered, "deviations": deviations}


def begun_in_stages(world: World, folder: str) -> None:
    """Begin a run in fp8 with a block on each rank; on a CPU, for once, with the formats of bf16."""
    small = {"layers": world.size, "width": 128, "heads": 2, "context": 32}
    recipe = recipe_for("gpt", model={"use": "gpt", **small}, batch=4, steps=3)
    mesh = Mesh(pipeline=world.size)
    plan = Plan(mesh=mesh, precision="fp8", micro_batch=2, accumulate=2, recompute="full")
    in_bf16 = patch.object(live_run, "numbers_for", lambda precision, device: numbers_for("bf16", device))
    with in_bf16, patch.object(float8, "LEAST_WIDTH", 128):
        live = live_run.LiveRun.from_recipe(recipe, plan, RunDirectory(Path(folder)), 1, world)
    live.recorder.close(state="finished")
