"""Accumulation: gradients of several micro-batches added up in fp32 where parameters are narrower.

In bf16 a sum of many small gradients stops growing: 256 + 1 is 256. Parameters in fp32 accumulate in fp32 anyway, and
then nothing here is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradus.parallel.world import World

NARROW = (torch.bfloat16, torch.float16)


class WideGradients:
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.dtype in NARROW]
        self._others = [p for p in parameters if p.dtype not in NARROW]
        self._sums: dict[nn.Parameter, Tensor] = {}

    @property
    def needed(self) -> bool:
        return bool(self._parameters)

    def take(self) -> None:
        """Add the gradients of a micro-batch, which are this rank's own, and make room for the next."""
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if parameter in self._sums:
                self._sums[parameter].add_(parameter.grad)
            else:
                self._sums[parameter] = parameter.grad.float()
            parameter.grad = None

    def give(self, world: World) -> None:
        """The mean over ranks as the parameters' gradients, rounded once.

        No backward reduced anything, because each would have reduced only its own micro-batch: all parameters are
        reduced here.
        """
        for parameter in self._parameters:
            if parameter in self._sums:
                parameter.grad = (world.sum_(self._sums[parameter]) / world.size).to(parameter.dtype)
        if world.size > 1:
            for parameter in self._others:
                if parameter.grad is not None:
                    world.sum_(parameter.grad).div_(world.size)
        self._sums.clear()

    def forget(self) -> None:
        self._sums.clear()
