"""Guard: whether the loss and the gradients of a step are numbers, decided on the device and the same on every rank.

The host learns of it one step late, as of all numbers of a step. With `on_nan: skip` the step has then changed nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradus.parallel.world import World


class Guard:
    def __init__(self, model: nn.Module, world: World, *, skips: bool) -> None:
        self._model, self._world, self.skips = model, world, skips
        self._before: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first forward pass of a step, which may change buffers (averages of batch normalisation)."""
        if self.skips:
            self._before = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]

    def not_finite(self, loss_sum: Tensor, count: Tensor, grad_norm: Tensor | None) -> Tensor:
        """1.0 if the step is not to be trusted, else 0.0. `grad_norm` is None where loss scaling looks at gradients."""
        bad = ~torch.isfinite(loss_sum / count)
        if grad_norm is not None:
            bad = bad | ~torch.isfinite(grad_norm).to(bad.device)
        # One rank alone may see it, if its memory is at fault; yet all must act alike.
        return self._world.sum_(bad.float()).clamp(max=1.0)

    @torch.no_grad()
    def undo(self, not_finite: Tensor) -> None:
        """Buffers as they were before the step, where it was bad."""
        for buffer, before in self._before:
            buffer.copy_(torch.where(not_finite.to(buffer.device) > 0, before, buffer))
        self._before = []
