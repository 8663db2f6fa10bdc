"""Materialise: memory for a model that was built, and split, without any; and the other way round.

On the meta device a tensor is a shape. A model that is split there and then given memory costs each rank its own part,
however large the whole is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def materialise(model: nn.Module, device: torch.device, shards_on: torch.device | None = None) -> None:
    """Give every parameter and buffer that is on the meta device memory of its own, once; the rest moves to the device.

    Parameters hold whatever was in that memory, buffers are zero. What was one tensor in two places stays one, which
    torch's own `to_empty` does not promise. Sharded parameters go to `shards_on`, where that is given.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with what it was made for, so that no number is used twice

    def with_memory(tensor: Tensor) -> Tensor:
        if id(tensor) in made:
            return made[id(tensor)][1]
        target = shards_on if shards_on is not None and isinstance(tensor, DTensor) else device
        if not tensor.is_meta:
            new = tensor.to(target)
        elif isinstance(tensor, nn.Parameter):
            new = torch.empty_like(tensor, device=target)
        else:
            new = torch.zeros_like(tensor, device=target)
        made[id(tensor)] = (tensor, new)
        made[id(new)] = (new, new)
        return new

    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter stays the same object: ties hold
    try:
        # What `nn.Module.to` and `to_empty` go through. Modules that keep hold of their parameters in other places
        # (FSDP2's, torch's LSTM) renew that there.
        model._apply(with_memory)  # type: ignore[no-untyped-call]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def taken_off(model: nn.Module) -> dict[str, Tensor]:
    """Move a model to the meta device, in place. What it held, by name: parameters and buffers, each once.

    Parameters stay the same objects, so that an optimizer still knows them.
    """
    held: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    held |= dict(model.named_buffers())
    for parameter in list(model.parameters()):
        parameter.grad = None
        shape = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, shape)  # type: ignore[no-untyped-call]
    shapes = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            module._buffers[name] = shapes.get(id(buffer), buffer)  # not registered anew: it stays as persistent
    return held
