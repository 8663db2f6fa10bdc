"""shard: parameters, gradients and optimizer state divided over the ranks of shard × context (FSDP2).

`zero` says what is divided while a step is under way. At its end every rank has its own rows of every parameter, of the
gradients and of the optimizer's state, whatever the stage:

| zero | parameters, gathered                  | gradients                                             |
|------|---------------------------------------|-------------------------------------------------------|
| 3    | for each block, when its turn comes   | reduced and scattered after each micro-batch          |
| 2    | from forward to backward              | the same                                              |
| 1    | from forward to backward              | whole until the last micro-batch                      |

In a pipeline gradients stay whole until the schedule's end with any of them: torch reduces them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from gradus.parallel.blocks import repeated_blocks
from gradus.parallel.expert import shard_experts
from gradus.parallel.world import World
from gradus.schema.plan import Plan


def shard(
    model: nn.Module,
    world: World,
    plan: Plan,
    computing: torch.dtype | None,
    blocks: Sequence[nn.Module] | None = None,
) -> None:
    """Divide the model in place, block by block. It may be on the meta device, and then has no memory yet.

    `computing` is the format that gathered parameters are turned into; None leaves them as they are. Inputs are left
    alone: autocast decides, operator by operator, as it does without sharding. Of a part of a model, `blocks` are those
    of the whole: a pipeline stage with one block does not show that it is repeated.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=computing,
        reduce_dtype=torch.bfloat16 if plan.compression == "bf16" else (torch.float32 if computing else None),
        cast_forward_inputs=False,
    )
    pinned = world.device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": sharding_mesh(world, plan),
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if plan.offload == "cpu" else OffloadPolicy(),
    }
    shard_experts(model, world, **options, reshard_after_forward=plan.zero == 3)
    held = set(model.modules())
    for block in repeated_blocks(model) if blocks is None else blocks:
        if block in held:
            fully_shard(block, **options, reshard_after_forward=plan.zero == 3)
    # The parts around the blocks are the first in forward and the last in backward, or the other way round: to let go
    # of them in between would gather them again at once.
    fully_shard(model, **options, reshard_after_forward=False)


def sharding_mesh(world: World, plan: Plan) -> DeviceMesh:
    """Over whom parameters are divided and, as an outer dimension, who has the same part (hybrid sharding)."""
    if plan.zero == 0:  # a group of one divides nothing
        return world.two_meshes(("replicate", "context"), ("shard",))
    if plan.mesh.replicate == 1:
        return world.flat_mesh("shard", "context")
    return world.two_meshes(("replicate",), ("shard", "context"))


def reduce_gradients(model: nn.Module, zero: int, *, last: bool) -> None:
    """Say, before a forward pass, what becomes of its gradients: `last` is the last micro-batch of a step."""
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last or zero >= 2)
    model.set_requires_all_reduce(last)
    # Not to let go of whole parameters between micro-batches saves gathering them again. After the last one they must
    # go: the optimizer updates the rows, and a whole copy that was kept would be trained on without a word.
    model.set_reshard_after_backward(last or zero == 3)


def let_go(model: nn.Module) -> None:
    """After forward passes without a backward, which would have done it: give back whole parameters.

    What is saved, and what the optimizer updates, are the rows.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
