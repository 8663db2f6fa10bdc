"""vocabulary: cross-entropy of logits of which each rank of a tensor group holds some classes. They are never gathered.

torch has `loss_parallel` for this, but it is a context that must be open during backward as well, wherever that is
called, and it counts no right answers. Here it is one autograd function, which works in any loop.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

IGNORED = -100  # a target that is not predicted, as for torch's own cross_entropy


def vocabulary_loss(
    logits: Tensor, targets: Tensor, training: bool, *, first: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sum of the cross-entropy of valid targets, their number and, in evaluation, how many are predicted right.

    `logits` (..., classes) is divided over the ranks of the group along its last dimension, evenly or not; `first` is
    this rank's first class. All ranks get the same.
    """
    assert isinstance(logits, DTensor), "logits are whole"
    classes = logits.shape[-1]
    mine = logits.to_local()
    mine = mine.to(torch.promote_types(mine.dtype, torch.float32)).flatten(0, -2)
    targets = targets.flatten()
    loss_sum: Tensor = _CrossEntropySum.apply(mine, targets, first, group)  # type: ignore[no-untyped-call]
    count = (targets != IGNORED).sum().to(loss_sum.dtype)
    if training:
        return loss_sum, count, None
    right = _predicted(mine.detach(), first, classes, group) == targets
    return loss_sum, count, right.sum().to(loss_sum.dtype)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        largest = _largest(logits, group)
        valid = targets != IGNORED
        column = targets - first
        here = valid & (column >= 0) & (column < logits.shape[-1])  # the target is one of this rank's classes
        rows = torch.arange(len(targets), device=targets.device)
        column = torch.where(here, column, 0)
        shifted = logits - largest[:, None]
        of_target = torch.zeros_like(largest)
        if logits.shape[-1]:
            of_target = torch.where(here, shifted[rows, column], of_target)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(dim=-1), of_target))
        dist.all_reduce(sums, group=group)
        total, of_target = sums
        ctx.save_for_backward(exponentials.div_(total[:, None]), here, column, valid)
        return torch.where(valid, total.log() - of_target, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, here, column, valid = ctx.saved_tensors
        result = probabilities * (gradient * valid)[:, None]
        if result.shape[-1]:
            rows = torch.arange(len(column), device=column.device)
            result[rows, column] -= gradient * here
        return result, None, None, None


def _largest(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest logit of each row over all ranks, one of which may have no class at all."""
    largest = logits.amax(dim=-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


def _predicted(logits: Tensor, first: int, classes: int, group: dist.ProcessGroup) -> Tensor:
    """The class with the largest logit over all ranks; of equal ones the first."""
    best = _largest(logits, group)
    found = torch.full(best.shape, classes, dtype=torch.long, device=best.device)
    if logits.shape[-1]:
        mine, at = logits.max(dim=-1)
        found = torch.where(mine == best, at + first, found)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    return found
