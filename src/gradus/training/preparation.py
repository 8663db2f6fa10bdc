"""Preparation: a model as the plan wants it. Every way to split a model is applied here, in this order."""

from __future__ import annotations

from torch import nn

from gradus.parallel.batch_norm import share_batch_norm
from gradus.parallel.blocks import repeated_blocks
from gradus.parallel.context import apply_context
from gradus.parallel.expert import apply_experts
from gradus.parallel.pipeline import cut
from gradus.parallel.recompute import apply_recompute
from gradus.parallel.replicate import averaging_group
from gradus.parallel.shard import shard
from gradus.parallel.tensor import apply_tensor
from gradus.parallel.wiring import Wiring
from gradus.parallel.world import World
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe
from gradus.training.compilation import compile_model
from gradus.training.float8 import apply_float8
from gradus.training.precision import Numbers


def prepared(
    model: nn.Module,
    recipe: Recipe,
    plan: Plan,
    world: World,
    numbers: Numbers,
    *,
    some_rank_may_pad: bool,
    wiring: Wiring | None = None,
) -> nn.Module:
    """Split the model, in place, as the plan says. Parameters keep their names. With a pipeline, what is returned is
    this rank's part of the model, cut where the `wiring` allows.

    The model may be on the meta device: weights are made, or read, after it was split, so that no rank ever holds all
    of them. Replicas are made after that (see `replicate`), since they begin by sending weights around.
    """
    apply_tensor(model, world, plan, recipe.tensor_plan)
    apply_experts(model, world)
    apply_context(model, world, plan)
    apply_float8(model, plan, world.device)
    apply_recompute(model, plan)
    if plan.compile:
        compile_model(model)
    parts, blocks = [model], repeated_blocks(model)
    if wiring is not None:
        model = cut(model, wiring, plan, world)
        parts = [*model.pipeline_cut.stages]
    if plan.sharded:
        group = averaging_group(world)
        # Ours, whoever may pad: torch's for CUDA takes no weights that are narrower than its statistics.
        share_batch_norm(model, world.device, some_rank_may_pad=True, group=group)
        for part in parts:
            shard(part, world, plan, numbers.autocast, blocks)
    return model
