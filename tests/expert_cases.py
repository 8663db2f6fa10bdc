"""What the pool's processes do to try mixtures of experts: train a small one, spread over the ranks of a mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gradus.data.loader import MicroBatch
from gradus.models import catalogue
from gradus.parallel.expert import apply_experts
from gradus.parallel.replicate import replicated
from gradus.parallel.shard import shard
from gradus.parallel.world import World
from gradus.schema.plan import Plan
from gradus.training.precision import numbers_for
from gradus.training.step import TrainingStep

SMALL = {
    "layers": 2,
    "width": 16,
    "heads": 2,
    "context": 8,
    "vocabulary": 32,
    "experts": 4,
    "experts_per_token": 2,
    "expert_inner": 8,
}
BATCH = 8


def trained(world: World, options: dict[str, Any], plan: Plan, steps: int = 5, real: int = BATCH) -> dict[str, Any]:
    """Loss, gradient norm and expert numbers of each step, whole weights, and what this rank holds of them.

    Of the last batch only `real` samples are there; a rank that has none of them gets padding.
    """
    world = world.arranged(plan.mesh)
    torch.manual_seed(7)
    model = catalogue.build("gpt", {**SMALL, **options}).double()
    apply_experts(model, world)
    wrapped: torch.nn.Module = model
    if plan.sharded:
        shard(model, world, plan, None)
    else:
        wrapped = replicated(model, world, plan.bucket_mib, some_rank_may_pad=True)
    step = TrainingStep(
        wrapped,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        None,
        numbers_for("fp64", world.device),
        world,
        accumulate=plan.accumulate,
        clip=1.0,
        seed=7,
        zero=plan.zero,
    )
    rows = []
    for number in range(steps):
        samples = real if number == steps - 1 else BATCH
        for micro in _micro_batches(world, plan, number, samples):
            with step.forward(micro, number):
                tokens, targets = micro.inputs
                output = wrapped(tokens, targets)
                weight = 1.0 if micro.samples else 0.0
            step.backward(output.loss_sum * weight, output.count * weight)
        numbers = step.apply(None, measure_norm=True).wait()
        rows.append({"loss": numbers.loss, "grad_norm": numbers.grad_norm, **numbers.experts})
    held = {name: _local(p).numel() for name, p in model.named_parameters()}
    whole = {name: _whole(tensor) for name, tensor in model.state_dict().items()}
    return {"rows": rows, "weights": whole, "held": held}


def _micro_batches(world: World, plan: Plan, step: int, samples: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(step)
    # Tokens that are not all alike: some experts are chosen more often than others.
    text = torch.randint(0, SMALL["vocabulary"], (BATCH, SMALL["context"] + 1), generator=generator)
    text = text.minimum(torch.randint(0, SMALL["vocabulary"], text.shape, generator=generator))
    size = plan.micro_batch
    first = world.data_rank * size * plan.accumulate
    batches = []
    for start in range(first, first + size * plan.accumulate, size):
        there = max(0, min(size, samples - start))
        rows = text[start : start + there] if there else text[:1]
        batches.append(MicroBatch((rows[:, :-1], rows[:, 1:]), there, start))
    return batches


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def built_on_meta(world: World, plan: Plan) -> dict[str, Any]:
    """What a rank has of a stacked weight after a model without memory was spread and sharded."""
    world = world.arranged(plan.mesh)
    with torch.device("meta"):
        model = catalogue.build("gpt", SMALL)
    apply_experts(model, world)
    shard(model, world, plan, None)
    up = model.get_parameter("blocks.0.mlp.experts.up")
    local = _local(up)
    return {
        "up": tuple(up.shape),
        "local": tuple(local.shape),
        "device": local.device.type,
        "experts_held": local.numel() / up.numel(),
    }
