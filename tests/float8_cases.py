"""What the pool's processes do in tests of fp8."""

from __future__ import annotations

import copy
from typing import Any

import torch
from recompute_cases import text, whole

from gradus.models import catalogue
from gradus.parallel.shard import shard
from gradus.parallel.world import World
from gradus.schema.plan import Mesh, Plan
from gradus.training.float8 import Float8Linear, apply_float8


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
