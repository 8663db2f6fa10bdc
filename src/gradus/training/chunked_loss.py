"""Chunked loss: the output layer and the cross-entropy of a few tokens at a time, so that never all logits are there.

A vocabulary is large: the logits of a micro-batch and their gradient are often the largest tensors of a step. Here the
loss applies the output layer itself, to one part of the tokens after the other. The gradients of a part are made while
its logits are at hand: nothing is computed twice, and backward only scales them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.models.layers import widened
from gradus.models.output import IGNORED, LossOutput, classification_loss


class OutputLayer(nn.Linear):
    """A model's last layer, which in training leaves its work to the loss and hands on what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else super().forward(x)


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

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.part = PartOfLoss()

    def forward(self, layer: nn.Linear, x: Tensor, targets: Tensor) -> LossOutput:
        """As `classification_loss` does in training, of `x` (..., width) and `targets` (...)."""
        if torch.is_grad_enabled():
            loss_sum = _LossSum.apply(x, layer.weight, layer.bias, targets, self)  # type: ignore[no-untyped-call]
        else:
            parts = _parts(x, layer.weight, layer.bias, targets, self.chunks)
            losses = [
                classification_loss(F.linear(rows, matrix, offset), wanted, training=True).loss_sum
                for rows, wanted, matrix, offset in parts
            ]
            loss_sum = torch.stack(losses).sum()
        return LossOutput(loss_sum, (targets != IGNORED).sum().to(loss_sum.dtype), None)


def _parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, count: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Some tokens and their targets at a time, and the weights as the layer multiplies with them."""
    device = x.device.type
    automatic = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if automatic else x.dtype
    matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    for rows, wanted in zip(x.flatten(0, -2).to(dtype).chunk(count), targets.flatten().chunk(count), strict=True):
        yield rows, wanted, matrix, offset


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    total += left @ right


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, whole: ChunkedLoss
    ) -> Tensor:
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        losses: list[Tensor] = []
        rows_gradients: list[Tensor] = []
        # Added up in float32 or wider, unlike the products themselves.
        weight_gradient = torch.zeros_like(widened(weight)) if of_weight else None
        bias_gradient = torch.zeros_like(widened(bias)) if of_bias and bias is not None else None
        # Detached: who watches modules by hooks takes what wants a gradient for a part of autograd's graph.
        given = (x.detach(), weight.detach(), None if bias is None else bias.detach())
        for rows, wanted, matrix, offset in _parts(*given, targets, whole.chunks):
            loss, gradient = whole.part(rows, matrix, offset, wanted)
            losses.append(loss)
            if of_x:
                rows_gradients.append(gradient @ matrix)
            if weight_gradient is not None:
                add_product(weight_gradient, gradient.t(), rows)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0, dtype=bias_gradient.dtype)
        x_gradient = torch.cat(rows_gradients).view(x.shape) if of_x else None
        ctx.save_for_backward(x_gradient, weight_gradient, bias_gradient)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if saved is None else saved * gradient for saved in ctx.saved_tensors)
        return (*scaled, None, None)
