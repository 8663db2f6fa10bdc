"""Narrow calls: an own loop's model computes with narrow weights inside its own calls, and nowhere else.

What the loop does besides, it does to the parameters themselves: it may read, average and write them. Nobody has traced
such a model. So where a call fails that does not with wide weights, the run goes on without narrow ones, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradus.record.format import first_line
from gradus.training.out_of_memory import is_out_of_memory
from gradus.training.step import TrainingStep

# What torch, its compiler and checks of a model's own raise at a format that they did not expect.
REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError)
# Gradients asked for by parameters, in whose place copies were used; formats that differ in the loop's own code; and
# what was computed outside of the model's calls, and again, with narrow weights, in backward.
_DUE_TO_COPIES = re.compile(
    r"appears to not have been used in the graph|BFloat16|Half|float16|same dtype|scalar type|different metadata"
)
HINT = "the model computes with copies of its weights in 16 bits; its own would be used with plan.narrow_weights=false"


def call_with_narrow_weights(model: nn.Module, step: TrainingStep, tell: Callable[[str], None]) -> None:
    """Have the model's calls, in place, use the narrow weights of `step`. `tell` is told if it does not take them."""
    inside: Callable[..., Any] = model._compiled_call_impl or model._call_impl
    has_taken_them = False

    def called(*positional: Any, **named: Any) -> Any:
        nonlocal has_taken_them
        refusal: str | None = None
        before = None
        with step.narrow_call() as narrow:
            if narrow:
                before = None if has_taken_them else _Before(model)
                try:
                    answer = inside(*positional, **named)
                except REFUSALS as error:
                    if is_out_of_memory(error) or step.is_recording:
                        raise
                    refusal = f"{type(error).__name__}: {first_line(error)}"  # not itself: it holds the activations
                else:
                    has_taken_them = True
                    return answer
        if before is not None:
            before.put_back()
        answer = inside(*positional, **named)
        if refusal is not None:
            step.refuse_narrow()
            tell(f"the model does not take weights in 16 bits, and goes on without (plan.narrow_weights): {refusal}")
        return answer

    # The outermost of what a call goes through: what is inside may be compiled, but not this. A copy of the model does
    # not get it.
    model._compiled_call_impl = torch.compiler.disable(called, recursive=False)  # type: ignore[no-untyped-call]


def hint_at_narrow_weights(error: BaseException) -> None:
    """Let an error that copies of the weights may be the cause of end with what to do about it."""
    if isinstance(error, REFUSALS) and _DUE_TO_COPIES.search(str(error)) and not hasattr(error, "__notes__"):
        vars(error)["__notes__"] = [f"hint: {HINT}"]  # as errors of ours have it


class _Before:
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
