"""Memory: the bytes of a model and its training state that this rank holds right now, counted on the tensors.

Nothing here is a formula: shards have the sizes and number formats that they really have, uneven ones included. Padding
that brings uneven shards to one size, and buffers of communication, are not counted; they belong to no parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from gradus.parallel.blocks import parameter_count, repeated_blocks
from gradus.planner.memory.model_state import ModelSize, ModelState
from gradus.training.gradients import local
from gradus.training.narrow_moments import NarrowMomentsAdamW


@dataclass(frozen=True)
class _Divided:
    """A parameter that FSDP2 divides: this rank's rows and, while they are there, the whole and its gradient."""

    shard: Tensor
    gathered: Tensor | None
    whole_gradients: tuple[Tensor | None, ...]
    elements: int  # of the whole
    computing: torch.dtype | None  # the format of the whole; None: that of the shard


@torch.no_grad()
def memory_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, device: torch.device | None = None
) -> ModelState:
    """What this rank holds now, in the middle of a step or between steps; only what is on `device`, if one is given.

    Each tensor counts once, however many names it has. Of replicas, give the wrapped model: DDP keeps the memory of
    gradients whether or not there are any.
    """
    divided = list(_divided(model))
    inside = {id(tensor) for one in divided for tensor in (one.shard, one.gathered)}
    plain = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    if isinstance(model, DistributedDataParallel):  # gradients are views of its buckets, as large as the parameters
        plain_gradients: list[Tensor | None] = [p for p in plain if p.requires_grad]
    else:
        plain_gradients = [p.grad for p in plain]
    narrow = [one for one in divided if one.computing not in (None, one.shard.dtype)]
    same = [one for one in divided if one.computing in (None, one.shard.dtype)]
    parameters = [*plain, *(one.gathered for one in divided), *(one.shard for one in same)]
    gradients = [*plain_gradients, *(g for one in divided for g in (one.shard.grad, *one.whole_gradients))]
    return ModelState(
        parameters=_bytes(parameters, device),
        master=_bytes([one.shard for one in narrow], device),
        gradients=_bytes(gradients, device),
        optimizer=_bytes(_state_of(optimizer), device),
    )


def size_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> ModelSize:
    """Numbers of elements that this rank would hold without sharding: of its tensor slice and stage, if it has them."""
    divided = list(_divided(model))
    inside = {id(tensor) for one in divided for tensor in (one.shard, one.gathered)}
    counted = [(local(p).numel(), p.requires_grad) for p in model.parameters() if id(p) not in inside]
    counted += [(one.elements, one.shard.requires_grad) for one in divided]
    parameters = sum(count for count, _ in counted)
    blocks = repeated_blocks(model)
    return ModelSize(
        parameters=parameters,
        trained=sum(count for count, trained in counted if trained),
        outside_blocks=max(0, parameters - parameter_count(blocks)),
        largest_block=max((parameter_count([block]) for block in blocks), default=parameters),
        optimizer_tensors=_tensors_for_each_parameter(optimizer),
    )


def _tensors_for_each_parameter(optimizer: torch.optim.Optimizer | None) -> float:
    """How much state the optimizer makes at its first step, in parameters: of Adam two, of momentum one."""
    if optimizer is None:
        return 2
    for parameter, state in optimizer.state.items():
        if state and isinstance(parameter, Tensor) and parameter.numel() > 0:
            return sum(v.nbytes for v in state.values() if isinstance(v, Tensor) and v.ndim) / parameter.nbytes
    settings = optimizer.defaults
    if isinstance(optimizer, NarrowMomentsAdamW):
        return 1
    if "betas" in settings or "rho" in settings:
        return 3 if settings.get("amsgrad") else 2
    return 1 if settings.get("momentum") else 0


def _divided(model: nn.Module) -> Iterator[_Divided]:
    """What FSDP2 holds. It has no public way to ask: outside of forward and backward the whole is out of sight."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group to a module
            for group in groups if groups is not None else [state._fsdp_param_group]:
                if group is None:  # nothing was left for this module itself
                    continue
                for one in group.fsdp_params:
                    whole = getattr(one, "_unsharded_param", None)  # made at the first forward
                    there = whole is not None and whole.untyped_storage().size() > 0  # it is emptied, not dropped
                    yield _Divided(
                        one.sharded_param,
                        whole if there else None,
                        (whole.grad if whole is not None else None, one.unsharded_accumulated_grad),
                        math.prod(one._orig_size),
                        group.mp_policy.param_dtype if one.sharded_param.is_floating_point() else None,
                    )


def _state_of(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    if optimizer is None:
        return []
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _bytes(tensors: list[Tensor] | list[Tensor | None], device: torch.device | None) -> int:
    held = {id(tensor): local(tensor) for tensor in tensors if tensor is not None}
    return sum(tensor.nbytes for tensor in held.values() if device is None or tensor.device == device)
