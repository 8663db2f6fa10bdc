"""Chunked loss: the output layer and the cross-entropy of a few tokens at a time, so that never all logits are there.

A vocabulary is large: the logits of a micro-batch and their gradient are often the largest tensors of a step. Here the
loss applies the output layer itself, to one part of the tokens after the other. The gradients of a part are made while
its logits are at hand: nothing is computed twice, and backward only scales them.

On a GPU a kernel of our own writes the gradient where the logits were (loss_kernel.py). It needs Triton, which nothing
else here does, and which is loaded when the kernel first runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # private, but there is no other way to know one

from gradus.models.layers import widened
from gradus.models.output import IGNORED, LossOutput, classification_loss
from gradus.parallel.support import LOSS_KERNEL_CAPABILITY
from gradus.schema.errors import InputError
from gradus.training.device import compute_capability, has_triton

FIELD = "plan.loss_chunks"
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of logits; fp64 keeps its digits
# Rows of the output matrix, in 16 bits: of an odd number of columns, the rows of logits begin anywhere, and then
# neither products nor the kernel can read 16 bytes at once. This many is a line of the cache.
ALIGNED_ROWS = 64

# As operators, they are also ones to those who watch operators: the planner runs them on tensors without values, with
# which torch 2.11 cannot do the second, aten's own.
_library: Any = torch.library.Library("gradus", "DEF")  # type: ignore[no-untyped-call]
_library.define("loss_and_gradient_(Tensor(a!) logits, Tensor targets, int columns) -> Tensor")
_library.define("addmm(Tensor(a!) total, Tensor left, Tensor right) -> ()")


def _loss_and_gradient(logits: Tensor, targets: Tensor, columns: int) -> Tensor:
    from gradus.training.loss_kernel import loss_and_gradient

    return loss_and_gradient(logits, targets, columns)


def _losses_without_values(logits: Tensor, targets: Tensor, columns: int) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.float32)


def _addmm(total: Tensor, left: Tensor, right: Tensor) -> None:
    torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)


_library.impl("loss_and_gradient_", _loss_and_gradient, "CompositeExplicitAutograd")
_library.impl("addmm", _addmm, "CompositeExplicitAutograd")
torch.library.register_fake("gradus::loss_and_gradient_", _losses_without_values, lib=_library)
torch.library.register_fake("gradus::addmm", lambda total, left, right: None, lib=_library)


def cannot_chunk(why: str, hint: str = "") -> InputError:
    return InputError(f"{FIELD}: {why}", hint=hint or f"use {FIELD}=1", field=FIELD, allowed=1)


class OutputLayer(nn.Linear):
    """A model's last layer, which in training leaves its work to the loss and hands on what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        handed_on: Tensor = _HandedOn.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return handed_on


class _HandedOn(torch.autograd.Function):
    """As it was given, in a graph in which the layer's weights are found.

    Who looks for them there, as DDP does for parameters that a step leaves out, would take them for unused: the loss
    that uses them comes after all of the model.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class PartOfLoss(nn.Module):
    """The loss of some tokens. A plan that compiles the model compiles this by itself."""

    def forward(self, rows: Tensor, matrix: Tensor, offset: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and its gradient by the logits."""
        logits = F.linear(rows, matrix, offset)
        wide = widened(logits)
        valid = (targets != IGNORED)[:, None]
        column = torch.where(valid, targets[:, None], 0)
        normaliser = torch.logsumexp(wide, dim=-1, keepdim=True)
        loss = torch.where(valid, normaliser - wide.gather(1, column), 0.0).sum()
        is_target = torch.arange(wide.shape[-1], device=wide.device) == column
        gradient = torch.where(valid, torch.exp(wide - normaliser) - is_target.to(wide.dtype), 0.0)
        return loss, gradient.to(logits.dtype)


class ChunkedLoss(nn.Module):
    """Cross-entropy of what an output layer would make of the tokens that it is given."""

    eager = True  # a compiler that saw all parts might do them at once, and have all logits

    def __init__(self, chunks: int, kernel: bool | None = None) -> None:
        super().__init__()
        self.chunks = chunks
        self.part = PartOfLoss()
        self.kernel = kernel  # whether to use it in place of `part`; None: on GPUs that can

    def forward(self, layer: nn.Linear, x: Tensor, targets: Tensor) -> LossOutput:
        """As `classification_loss` does in training, of `x` (..., width) and `targets` (...)."""
        if x.shape[:-1].numel() != targets.numel():
            raise cannot_chunk(
                f"an output layer that is given {tuple(x.shape)} makes no logits for targets of the shape "
                f"{tuple(targets.shape)} with the classes last"
            )
        if torch.is_grad_enabled():
            loss_sum = _LossSum.apply(x, layer.weight, layer.bias, targets, self)  # type: ignore[no-untyped-call]
        else:
            work = work_of(x, layer.weight, layer.bias, targets, kernel=False)
            losses = [
                classification_loss(F.linear(rows, work.matrix, work.offset), wanted, training=True).loss_sum
                for rows, wanted in work.parts(self.chunks)
            ]
            loss_sum = torch.stack(losses).sum()
        return LossOutput(loss_sum, (targets != IGNORED).sum().to(loss_sum.dtype), None)


@dataclass(frozen=True)
class Work:
    """What is multiplied, as it is multiplied."""

    rows: Tensor  # (tokens, width)
    targets: Tensor  # (tokens)
    matrix: Tensor  # (columns, width), or more rows than that: below, there are zeros
    offset: Tensor | None
    columns: int
    kernel: bool

    def parts(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Some tokens and their targets at a time."""
        return zip(self.rows.chunk(count), self.targets.chunk(count), strict=True)

    def loss_and_gradient(self, rows: Tensor, targets: Tensor, part: nn.Module) -> tuple[Tensor, Tensor]:
        """Losses of some tokens, added up or not, and the gradient of their sum by the logits."""
        if not self.kernel:
            loss, gradient = part(rows, self.matrix, self.offset, targets)
            return loss.view(1), gradient
        logits = F.linear(rows, self.matrix, self.offset)
        return torch.ops.gradus.loss_and_gradient_(logits, targets, self.columns), logits


def work_of(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, kernel: bool | None) -> Work:
    device = x.device.type
    automatic = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if automatic else x.dtype
    if kernel is None:
        kernel = _has_kernel(x.device)
    kernel = kernel and dtype in KERNEL_DTYPES
    multiple = ALIGNED_ROWS if kernel and dtype.itemsize == 2 else 1
    return Work(
        x.flatten(0, -2).to(dtype),
        targets.flatten(),
        padded(weight, multiple, dtype),
        None if bias is None else padded(bias, multiple, dtype),
        len(weight),
        kernel,
    )


@cache
def _has_kernel(device: torch.device) -> bool:
    capability = compute_capability(device)
    return capability is not None and capability >= LOSS_KERNEL_CAPABILITY and has_triton()


def padded(tensor: Tensor, multiple: int, dtype: torch.dtype) -> Tensor:
    """The tensor in a format, with zeros below, so that its rows are a multiple of something: in one copy, or none."""
    rows = len(tensor)
    more = -rows % multiple
    if not more:
        return tensor.to(dtype)
    result = tensor.new_empty((rows + more, *tensor.shape[1:]), dtype=dtype)
    result[:rows].copy_(tensor)
    result[rows:].zero_()
    return result


def added_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """`total` and left @ right, in float32 or wider, in the memory of `total` where there is one.

    On a GPU that is one kernel for operands of 16 bits too, which rounds nothing on the way. Tensors without values
    stand for those of a GPU.
    """
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.dtype == wide:
        return left @ right if total is None else total.addmm_(left, right)
    if torch.version.hip is None and (left.is_cuda or isinstance(left, FakeTensor)):
        if total is None:
            return torch.mm(left, right, out_dtype=wide)
        torch.ops.gradus.addmm(total, left, right)
        return total
    return (left @ right).to(wide) if total is None else total.add_(left @ right)


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, whole: ChunkedLoss
    ) -> Tensor:
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        # Detached: who watches modules by hooks takes what wants a gradient for a part of autograd's graph.
        given = (x.detach(), weight.detach(), None if bias is None else bias.detach())
        work = work_of(*given, targets, whole.kernel)
        losses: list[Tensor] = []
        x_gradient = torch.empty_like(work.rows) if of_x else None
        weight_gradient: Tensor | None = None
        bias_gradient: Tensor | None = None
        done = 0
        for rows, wanted in work.parts(whole.chunks):
            loss, gradient = work.loss_and_gradient(rows, wanted, whole.part)
            losses.append(loss)
            if x_gradient is not None:
                torch.mm(gradient, work.matrix, out=x_gradient[done : done + len(rows)])
            if of_weight:
                weight_gradient = added_product(weight_gradient, gradient.t(), rows)
            if of_bias:
                of_part = gradient.sum(0, dtype=torch.promote_types(gradient.dtype, torch.float32))
                bias_gradient = of_part if bias_gradient is None else bias_gradient.add_(of_part)
            done += len(rows)
            del gradient  # before there are the logits of the next
        ctx.save_for_backward(
            None if x_gradient is None else x_gradient.view(x.shape),
            None if weight_gradient is None else weight_gradient[: work.columns],
            None if bias_gradient is None else bias_gradient[: work.columns],
        )
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, weight, bias)]
        ctx.kernel = work.kernel
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Once, or again: what was saved stays as it is."""
        if torch.is_grad_enabled():  # with create_graph: what was saved has no history, and they would be wrong
            raise cannot_chunk("a loss in parts has no gradients of gradients (create_graph=True)")
        saved = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
        return (
            *(_scaled(one, gradient, dtype, ctx.kernel) if wanted else None for one, dtype, wanted in saved),
            None,
            None,
        )


def _scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype, kernel: bool) -> Tensor:
    """In another format, in one pass, and rounded once."""
    if kernel and dtype in KERNEL_DTYPES and tensor.is_cuda and not isinstance(tensor, FakeTensor):
        from gradus.training.loss_kernel import scaled

        return scaled(tensor, factor, dtype)
    # The factor has a dimension so that it counts as a tensor: a GPU would round a single number to 16 bits first, and
    # make all gradients wrong by the same part.
    return torch.mul(tensor, factor.view(1), out=torch.empty_like(tensor, dtype=dtype))
