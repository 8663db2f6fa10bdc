"""AdamW with moments in bf16: half of the memory that its state takes, and eight bytes less to move for each parameter.

A moment changes by a small part of itself in a step, often by less than the last digit that bf16 has: rounded to the
nearest number, it would stay where it is. So it is rounded up or down by chance, the nearer the likelier, and is right
on average. The chance is a hash of the place of a number in its whole tensor and of the step: a run that goes on from a
checkpoint is the run that never stopped, and how tensors are divided over ranks makes no difference. (The kernel for
narrow weights counts places as they lie in memory: of channels_last weights it rounds others up than this does.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradus.parallel.part import local_part
from gradus.training.gradients import local

DTYPE = torch.bfloat16
PIECE = 2**22  # numbers that are widened at once, where one kernel does not do it all
_CUT_OFF = 0xFFFF  # what bf16 has not of the bits of fp32
_LOW_32 = 0xFFFFFFFF
_LACKING = ("amsgrad", "maximize", "differentiable", "capturable", "fused", "foreach")  # of what torch's has


def chance(places: Tensor, step: Tensor) -> Tensor:
    """32 bits of noise for each place: the upper half is for the first moment, the lower for the second."""
    bits = (places + step.long() * 0x9E3779B9) & _LOW_32
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _LOW_32
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _LOW_32
    return bits ^ (bits >> 16)


def rounded(values: Tensor, noise: Tensor) -> Tensor:
    """fp32 values in bf16, up or down: `noise` is from 0 to 65,535. What is not finite stays so."""
    up_or_down = (values.view(torch.int32) + noise.to(torch.int32)) & ~_CUT_OFF
    return torch.where(values.isfinite(), up_or_down.view(torch.float32), values).to(DTYPE)


class NarrowMomentsAdamW(torch.optim.AdamW):
    """torch's AdamW but for the format of its moments, for parameters in fp32 on any device, divided or not."""

    state_dtype = DTYPE

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        lacking = [name for name in _LACKING if options.get(name)]
        if lacking:
            raise ValueError(f"moments in bf16 do not go with {lacking[0]}")
        super().__init__(params, lr=lr, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(parameter)
        state["step"] += 1
        tensors = [local(tensor) for tensor in (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])]
        step, (beta1, beta2) = state["step"], group["betas"]
        for places, (weights, gradients, mean, square) in _pieces(parameter, tensors):
            noise = chance(places, step)
            wide = gradients.float()
            new_mean = mean.float().lerp_(wide, 1 - beta1)
            new_square = square.float().mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
            corrected = (new_square / (1 - beta2**step)).sqrt_().add_(group["eps"])
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.addcdiv_(new_mean * (-group["lr"] / (1 - beta1**step)), corrected)
            mean.copy_(rounded(new_mean, noise >> 16))
            square.copy_(rounded(new_square, noise & _CUT_OFF))

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state |= self._new_state(parameter)
        # A checkpoint puts numbers of steps on the host, and a kernel reads them where the parameter is.
        state["step"] = state["step"].to(local(parameter).device, torch.float32)
        return state

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        like: dict[str, Any] = {"dtype": self.state_dtype, "memory_format": torch.preserve_format}
        return {
            "step": torch.zeros((), dtype=torch.float32, device=local(parameter).device),
            "exp_avg": torch.zeros_like(parameter, **like),
            "exp_avg_sq": torch.zeros_like(parameter, **like),
        }


def places_of(parameter: Tensor) -> Tensor:
    """Of what this rank holds of a parameter: where each number is in the whole, counted row by row."""
    box = local_part(parameter)
    places = torch.zeros((), dtype=torch.int64, device=box.tensor.device)
    for length, offset, size in zip(box.tensor.shape, box.offset, parameter.shape, strict=True):
        here = torch.arange(offset, offset + length, device=box.tensor.device)
        places = places.unsqueeze(-1) * size + here
    return places


def _pieces(parameter: Tensor, tensors: list[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Some numbers of all tensors at a time, and their places: what is made of them must not take as much memory as the
    moments save. Except of those that do not lie side by side, or are divided by more than rows."""
    box = local_part(parameter)
    size, in_rows = box.tensor.numel(), box.tensor.shape[1:] == parameter.shape[1:]
    if size <= PIECE or not in_rows or not all(tensor.is_contiguous() for tensor in tensors):
        yield places_of(parameter), tensors
        return
    flat, before = [tensor.view(-1) for tensor in tensors], box.offset[0] * parameter.shape[1:].numel()
    for first in range(0, size, PIECE):
        last = min(size, first + PIECE)
        places = torch.arange(before + first, before + last, device=box.tensor.device)
        yield places, [tensor[first:last] for tensor in flat]
