"""Narrow calls: an own loop's model computes with narrow weights inside its own calls, and nowhere else.

What the loop does besides, it does to the parameters themselves: it may read, average and write them. Nobody has traced
such a model. So where a call fails that does not with wide weights, the run goes on without narrow ones, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradus.record.format import error_text
from gradus.training.out_of_memory import is_out_of_memory
from gradus.training.step import TrainingStep

# What torch, its compiler and checks of a model's own raise at a format that they did not expect.
REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError)
# Gradients asked for by parameters, in whose place copies were used; formats that differ in the loop's own code; and
# what was computed outside of the model's calls, and again, with narrow weights, in backward.
_DUE_TO_COPIES = re.compile(
    r"appears to not have been used in the graph|BFloat16|Half|float16|same dtype|scalar type|different metadata"
)
_NO_CALL = (
    "no call of it went into the loss, or one that the script compiled after run.prepare; "
    "torch.compile(model) before run.prepare keeps them"
)
HINT = "the model computes with copies of its weights in 16 bits; its own would be used with plan.narrow_weights=false"


@contextmanager
def narrow_calls(model: nn.Module, step: TrainingStep, tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, calls of the model use the narrow weights of `step`. `tell` is told if they do not."""
    outermost = model._compiled_call_impl
    inside: Callable[..., Any] = outermost or model._call_impl
    attempts = _Attempts(model, step, tell)
    # Where the script compiles the prepared model, what is inside of a call is traced, and nothing of this.
    untraced: Callable[..., Any] = torch.compiler.disable
    begin, taken = untraced(attempts.begin), untraced(attempts.taken)
    may_be_refused, settle = untraced(attempts.may_be_refused), untraced(attempts.settle)

    def called(*positional: Any, **named: Any) -> Any:
        if begin():
            try:
                answer = inside(*positional, **named)
            except BaseException as error:
                if not may_be_refused(error):
                    raise
            else:
                taken()
                return answer
        answer = inside(*positional, **named)
        settle()
        return answer

    step.on_wide_loss = lambda: tell(f"the model goes on without weights in 16 bits (plan.narrow_weights): {_NO_CALL}")
    ours = untraced(called, recursive=False)
    model._compiled_call_impl = ours  # the outermost of what a call goes through; a copy of the model does not get it
    try:
        yield
    finally:
        if model._compiled_call_impl is ours:  # and not something that the script has put there
            model._compiled_call_impl = outermost


class _Attempts:
    """Calls with narrow weights, of which the first shows whether the model takes them."""

    def __init__(self, model: nn.Module, step: TrainingStep, tell: Callable[[str], None]) -> None:
        self._model, self._step, self._tell = model, step, tell
        self._has_taken_them = False
        self._before: _Before | None = None
        self._autocasts = 0  # around the call
        self._refusal: str | None = None

    def begin(self) -> bool:
        """Whether this call has narrow weights."""
        self._refusal = None
        if not self._step.begin_narrow_call():
            return False
        self._before = None if self._has_taken_them else _Before(self._model)
        self._autocasts = _autocasts()
        return True

    def taken(self) -> None:
        self._step.end_narrow_call()
        self._has_taken_them, self._before = True, None

    def may_be_refused(self, error: BaseException) -> bool:
        """Whether it failed in a way that it may not with wide weights: then it is called with those."""
        self._step.end_narrow_call()
        _leave_autocasts(self._autocasts)
        if not isinstance(error, REFUSALS) or is_out_of_memory(error) or self._step.is_recording:
            return False
        self._refusal = error_text(error)  # not itself: it holds the activations
        if self._before is not None:
            self._before.put_back()
        return True

    def settle(self) -> None:
        """With wide weights it did not fail."""
        if self._refusal is None:
            return
        self._step.refuse_narrow()
        self._tell(
            f"the model does not take weights in 16 bits, and goes on without (plan.narrow_weights): {self._refusal}"
        )


def hint_at_narrow_weights(error: BaseException) -> None:
    """Let an error that copies of the weights may be the cause of end with what to do about it."""
    if isinstance(error, REFUSALS) and _DUE_TO_COPIES.search(str(error)) and not hasattr(error, "__notes__"):
        vars(error)["__notes__"] = [f"hint: {HINT}"]  # as errors of ours have it


def _autocasts() -> int:
    """How many contexts of autocast this is inside of."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _leave_autocasts(around: int) -> None:
    """As it was around a call: of code whose tracing fails, torch's compiler does not leave the contexts of autocast.

    Then the outermost never ends, and weights that were cast for one step would be used in all others.
    """
    while _autocasts() > around:
        torch.autocast_decrement_nesting()
    if around == 0:
        torch.clear_autocast_cache()


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
