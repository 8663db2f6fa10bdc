"""Gradients: what a rank holds of them after the last backward of a step, and numbers over all of them.

A parameter may be a DTensor of which this rank has some rows. Everything here works on the local part, so that plain
and divided parameters, of one mesh or several, are treated alike; sums go over ranks where parts differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from gradus.parallel.world import World


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, as memory that may be written to."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def settle_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Divide gradients as their parameters are. Those of layers that see slices of a sequence are not summed before."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def total_norm(tensors: Sequence[tuple[Tensor, Tensor]], world: World, *, uncounted: Collection[Tensor] = ()) -> Tensor:
    """The norm of whole gradients or weights, given as pairs (parameter, tensor), the same on every rank.

    `uncounted` parameters are copies of what another pipeline stage has.
    """
    values = [local(tensor) for _, tensor in tensors]
    divided = any(isinstance(parameter, DTensor) for parameter, _ in tensors)
    if not divided and world.mesh.pipeline == 1:  # every rank has everything
        return _norm(values)
    # Each element counts once: on each of the ranks that hold it, with its share.
    holders = world.size // world.mesh.pipeline
    by_share: dict[float, list[Tensor]] = {}
    for (parameter, _), value in zip(tensors, values, strict=True):
        if parameter not in uncounted:
            by_share.setdefault(_parts(parameter) / holders, []).append(value)
    square = torch.zeros((), dtype=torch.float64, device=world.device)
    for share, alike in by_share.items():
        square += share * _norm(alike).to(world.device, torch.float64) ** 2
    dtype = max((value.dtype for value in values), key=lambda dtype: dtype.itemsize, default=torch.float64)
    return world.sum_(square).sqrt().to(dtype)


def _norm(tensors: list[Tensor]) -> Tensor:
    """As torch takes it; but the norms of tensors of 16 bits are not rounded before they are put together."""
    narrow = [tensor for tensor in tensors if tensor.dtype in (torch.bfloat16, torch.float16)]
    if not narrow:
        return get_total_norm(tensors)
    wide = [tensor for tensor in tensors if tensor.dtype not in (torch.bfloat16, torch.float16)]
    norms = [*torch._foreach_norm(narrow, 2.0, torch.float32), *([get_total_norm(wide).float()] if wide else [])]
    # As torch does it: offloaded ones are elsewhere.
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return norm


def clipping(limit: float, norm: Tensor) -> Tensor:
    """What gradients are multiplied with so that the norm of the whole is at most `limit`. As torch clips."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply local gradients, in place. Those of offloaded parameters are in host memory, others are not."""
    devices: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        devices.setdefault(gradient.device, []).append(gradient)
    for device, group in devices.items():
        torch._foreach_mul_(group, factor.to(device))


def _parts(parameter: Tensor) -> int:
    """Into how many parts a parameter is divided over the ranks."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())
