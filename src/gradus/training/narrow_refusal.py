"""Refusal: what a model raises that does not take narrow weights, and computing it again as if it had not begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from gradus.record.format import error_text
from gradus.schema.errors import GradusError, InputError
from gradus.training.out_of_memory import is_out_of_memory
from gradus.training.step import TrainingStep

T = TypeVar("T")

# What torch, its compiler and checks of a model's own raise at a format that they did not expect.
REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError)


def refusal_in(error: BaseException) -> str | None:
    """What it says, if wide weights may be all that is missing."""
    if isinstance(error, GradusError) and error.__cause__ is not None:  # which was explained
        error = error.__cause__
    if not isinstance(error, REFUSALS) or is_out_of_memory(error):
        return None
    return error_text(error)


def goes_on_without(refusal: str) -> str:
    return f"the model does not take weights in 16 bits, and goes on without (plan.narrow_weights): {refusal}"


class NarrowTrial:
    """The first loss of a recipe's run, which shows whether the model takes narrow weights.

    A plan knows it from a trace, in which nothing is computed: some kernels have no 16 bits, and no trace says which.
    """

    def __init__(self, step: TrainingStep, tell: Callable[[str], None], *, fixed: bool) -> None:
        """`fixed`: by the recipe, which then has to say something else."""
        self._step, self._tell, self._fixed = step, tell, fixed

    def __call__(self, lost: Callable[[], T]) -> T:
        """What `lost` returns: computed with wide weights, from now on, where it fails with narrow ones alone."""
        before, around = Before(self._step.model), autocasts()
        try:
            return lost()
        except Exception as error:
            refusal = refusal_in(error)  # not the error itself: it holds the activations
            if refusal is None:
                raise
        leave_autocasts(around)
        before.put_back()
        self._step.refuse_narrow()
        self._step.abandon()
        answer = lost()
        if self._fixed:
            raise InputError(
                f"plan.narrow_weights: found true, but with weights in 16 bits the model fails: {refusal}",
                hint="use plan.narrow_weights=false",
                field="plan.narrow_weights",
                found=True,
                allowed=False,
            )
        self._tell(goes_on_without(refusal))
        return answer


def autocasts() -> int:
    """How many contexts of autocast this is inside of."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def leave_autocasts(around: int) -> None:
    """As it was around a call: of code whose tracing fails, torch's compiler does not leave the contexts of autocast.

    Then the outermost never ends, and weights that were cast for one step would be used in all others.
    """
    while autocasts() > around:
        torch.autocast_decrement_nesting()
    if around == 0:
        torch.clear_autocast_cache()


class Before:
    """What a call that fails midway leaves changed: random numbers that were drawn, and buffers such as statistics."""

    def __init__(self, model: nn.Module) -> None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._drawn = [generator.get_state() for generator in self._generators]
        self._buffers: list[tuple[Tensor, Tensor]] = [(b, b.detach().clone()) for b in model.buffers()]

    @torch.no_grad()
    def put_back(self) -> None:
        for generator, state in zip(self._generators, self._drawn, strict=True):
            generator.set_state(state)
        for buffer, value in self._buffers:
            buffer.copy_(value)
