"""Accumulation: gradients of several micro-batches added up in fp32 where parameters are narrower.

In bf16 a sum of many small gradients stops growing: 256 + 1 is 256. Parameters in fp32 accumulate in fp32 anyway, and
then nothing here is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradus.parallel.world import World
from gradus.schema.errors import InputError

NARROW = (torch.bfloat16, torch.float16)


def check_parameters_are_wide(model: nn.Module) -> None:
    """Refuse 16-bit parameters where FSDP2 adds up their gradients, which it does in the parameters' own format."""
    narrow = next((name for name, p in model.named_parameters() if p.requires_grad and p.dtype in NARROW), None)
    if narrow is not None:
        raise InputError(
            f"plan.accumulate_dtype: found fp32, but {narrow} has 16 bits and is sharded: its gradients are added up "
            "in them",
            hint="use plan.accumulate_dtype=parameters or plan.accumulate=1, or build the model in fp32",
            field="plan.accumulate_dtype",
            found="fp32",
            allowed="parameters",
        )


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
        reduced here. Ranks may have used other parts of the model; they agree first on what is to be reduced.
        """
        used = _used_anywhere([p in self._sums for p in self._parameters], world)
        for parameter, is_used in zip(self._parameters, used, strict=True):
            if is_used:
                mine = self._sums.get(parameter)
                total = torch.zeros_like(parameter, dtype=torch.float32) if mine is None else mine
                parameter.grad = _mean(total, world).to(parameter.dtype)
        if world.averaging_ranks > 1:
            used = _used_anywhere([p.grad is not None for p in self._others], world)
            for parameter, is_used in zip(self._others, used, strict=True):
                if is_used:
                    mine = parameter.grad
                    parameter.grad = _mean(torch.zeros_like(parameter) if mine is None else mine, world)
        self._sums.clear()

    def forget(self) -> None:
        self._sums.clear()


def _mean(total: Tensor, world: World) -> Tensor:
    """Over ranks with other samples. Where there are any, all ranks are such: FSDP2 takes care of other meshes."""
    return total if world.averaging_ranks == 1 else world.sum_(total) / world.averaging_ranks


def _used_anywhere(here: list[bool], world: World) -> list[bool]:
    # A tensor of the host, which gloo sends: nothing waits for the device.
    return [number > 0 for number in world.sum_(torch.tensor(here, dtype=torch.int32)).tolist()]
