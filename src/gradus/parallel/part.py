"""Part: what this rank holds of a tensor that may be divided over ranks, and where in the whole it lies."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_REDISTRIBUTE = logging.getLogger("torch.distributed.tensor._redistribute")


@dataclass(frozen=True)
class Box:
    """The part of a tensor that this rank holds: its memory, and for each dimension where in the whole it begins."""

    tensor: Tensor
    offset: tuple[int, ...]

    @property
    def rows(self) -> range:
        """Which rows of the whole are here, at least in part; a number without dimensions counts as one row."""
        first = self.offset[0] if self.offset else 0
        return range(first, first + (self.tensor.shape[0] if self.tensor.dim() else 1))


def local_part(tensor: Tensor) -> Box:
    """All of a plain tensor; of one that is sharded over ranks, this rank's shard."""
    if not isinstance(tensor, DTensor):
        return Box(tensor.detach(), (0,) * tensor.dim())
    # Private, and the one place that knows the rows of a tensor that tensor parallelism and FSDP2 have both divided.
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tensor.to_local().detach(), tuple(offset))


@torch.no_grad()
def put_rows(target: Tensor, rows: Tensor, first_row: int = 0) -> None:
    """Copy whole rows, the first of which is row `first_row` of the whole, where this rank holds some of them."""
    box = local_part(target)
    if target.dim() == 0:
        box.tensor.copy_(rows.reshape(()))
        return
    here = range(max(box.rows.start, first_row), min(box.rows.stop, first_row + rows.shape[0]))
    if not len(here) or not box.tensor.numel():
        return
    taken = rows[here.start - first_row : here.stop - first_row]
    for dim in range(1, rows.dim()):
        taken = taken.narrow(dim, box.offset[dim], box.tensor.shape[dim])
    box.tensor[here.start - box.rows.start : here.stop - box.rows.start].copy_(taken)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; of one that is sharded, gathered from the ranks that hold it, all of which must call this."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    level = _REDISTRIBUTE.level
    _REDISTRIBUTE.setLevel(logging.ERROR)  # it warns that two dimensions of a mesh are gathered one after the other
    try:
        return tensor.full_tensor()
    finally:
        _REDISTRIBUTE.setLevel(level)
