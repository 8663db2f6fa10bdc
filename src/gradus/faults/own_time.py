"""Own time: the clock of a rank's steps. What a step's time went to, and how long the rank itself worked in it.

Ranks that train together take the same time for a step, however slow one of them is: the others wait. So one clock runs
from the end of a step to the end of the next, and always stands in one of the kinds of `schema.breakdown`:

- the phase says which (`Whereabouts.enter`), and inside one the code that does something else (`inside`);
- a wait for other ranks is found where it happens, in any mesh: in torch's own waits (`faults.waits`), and from the
  last gradient of a backward pass to its end, which is where DDP, in C++, waits for its buckets.

The work of the rank itself is all but waits, evaluations and saves.

On a CPU the host's clock is all there is. On a GPU the host runs ahead, and what counts is what the device was held up
by: in some of the steps an event goes into the stream wherever the clock moves on, and the distances between them are
asked for a step later, when they have passed: the host never waits for the device for this. Around the fetching of
batches, events are recorded in every step: a wait for data costs what the device idled, not what the host waited.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradus.faults.waits import tell_of_waits
from gradus.faults.whereabouts import Phase, Whereabouts
from gradus.schema.breakdown import KINDS

WINDOW = 20  # measured steps over which medians are taken: one slow step in many is not a slow rank
# Of the steps on a GPU, every so many: recording an event takes the host 2 to 4 microseconds, and a model that is
# sharded in 50 parts has 200 of them in a step. And the first few, so that a short run is not without any.
GPU_STEPS = 10
FIRST_GPU_STEPS = 3

_DATA, _COPY, _FORWARD, _BACKWARD, _WAIT, _OPTIMIZER, _CHECKPOINT, _EVALUATION, _OTHER = range(len(KINDS))
_FOR_DEVICE = len(KINDS)  # of the host's clock only: it waits until the device has come so far
_KIND_OF_PHASE: dict[Phase, int] = {
    "data": _DATA,
    "forward-backward": _FORWARD,
    "optimizer": _OPTIMIZER,
    "saving": _CHECKPOINT,
    "evaluating": _EVALUATION,
}
_NOT_WORK = (_WAIT, _CHECKPOINT, _EVALUATION, _FOR_DEVICE)

Event = Any  # torch's event in a stream of a GPU


@dataclass(frozen=True)
class OwnSeconds:
    """Medians over the last measured steps."""

    work: float  # everything that this rank did by itself, data included
    data: float  # of it, waiting for data


@dataclass(frozen=True)
class StepTimes:
    """A step that is over."""

    step: int
    host: dict[str, float]  # seconds by kind, as the host's clock went
    fetching: float | None  # on a GPU: seconds that the device idled, or worked, for batches to be there


class _Step:
    """A step under measurement, or one whose events are still to come."""

    __slots__ = ("data_seconds", "fetches", "host", "marks", "number")

    def __init__(self, first: Event) -> None:
        self.number = 0
        self.host = [0.0] * (len(KINDS) + 1)
        # On a GPU, if it is measured: events, each with the kind of what was before it.
        self.marks: list[tuple[int, Event]] | None = None if first is None else [(_OTHER, first)]
        self.fetches: list[Event] = []  # beginnings and ends in turn
        self.data_seconds = 0.0


class OwnTime:
    """The clock of one rank. The thread that trains calls; `seconds` may be asked for by others."""

    def __init__(self, where: Whereabouts, device: torch.device) -> None:
        self.where = where
        self.on_gpu = device.type == "cuda"
        # The one that trains. Code that waits for others may have a stream of its own, whose events say nothing of it.
        self._stream = torch.cuda.current_stream(device) if self.on_gpu else None
        self._kind, self._since = _OTHER, time.monotonic()
        self._step: _Step | None = None
        self._ended: deque[_Step] = deque()
        self._pending: deque[_Step] = deque()  # measured on a GPU, and not yet passed by it
        self._measured: list[dict[str, float]] = []
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._hook: Any = None
        self._depth = self._number = 0
        self._after_last_gradient = False
        self._waiting = _Waiting(self)
        self._inside = {kind: _Inside(self, number) for number, kind in enumerate(KINDS)}
        self._backward = _Backward(self)
        self._for_device = _Inside(self, _FOR_DEVICE)
        where.on_enter = self._phase
        self.on_switch: Callable[[str], None] | None = None  # told of the kind that begins, where a trace is recorded
        self._no_more_waits = tell_of_waits(self, on_gpu=self.on_gpu)

    def close(self) -> None:
        self._no_more_waits()
        self.where.on_enter = None
        if self._hook is not None:
            self._hook.remove()

    def watch_gradients(self, model: nn.Module) -> None:
        """DDP waits in C++ after the last gradient: that of the parameter which the forward pass uses first."""
        first = next((p for p in model.parameters() if p.requires_grad), None)
        if self._hook is not None:
            self._hook.remove()  # of a model that a rollback has replaced
        if isinstance(model, DistributedDataParallel) and first is not None:
            self._hook = first.register_post_accumulate_grad_hook(self._on_last_gradient)  # type: ignore[no-untyped-call]

    def seconds(self) -> OwnSeconds | None:
        """None before enough steps are measured to say anything."""
        recent = list(self._recent)
        if len(recent) < 3:
            return None
        return OwnSeconds(median(work for work, _ in recent), median(data for _, data in recent))

    # ---- the steps

    def start(self) -> None:
        """The first step begins here, or the one from which a run that went back goes on."""
        self._ended.clear()
        self._pending.clear()
        self._measured.clear()
        self._kind, self._since = _OTHER, time.monotonic()
        self._step = self._next_step(None)

    def stepped(self, step: int, data_seconds: float) -> None:
        """Step number `step` is done, or on its way to the device; the next one begins."""
        done, now, mark = self._step, time.monotonic(), None
        if done is not None:
            done.number, done.data_seconds = step, data_seconds
            done.host[self._kind] += now - self._since
            if done.marks is not None:
                mark = self._event()
                done.marks.append((self._kind, mark))
                self._pending.append(done)
            self._ended.append(done)
            if not self.on_gpu:
                self._note(done.host, data_seconds)
        self._kind, self._since = _OTHER, now
        self._step = self._next_step(mark)

    def elsewhere(self) -> None:
        """The step so far was an evaluation or a save, of which the device's events say nothing."""
        if self._step is not None and self._step.marks is not None:
            self._step.marks = [(_OTHER, self._event())]

    def settle(self) -> None:
        """Take in measured steps that the device has come past."""
        while self._pending and self._pending[0].marks[-1][1].query():  # type: ignore[index]
            step = self._pending.popleft()
            seconds = [0.0] * len(KINDS)
            assert step.marks is not None
            before = step.marks[0][1]
            for kind, event in step.marks[1:]:
                seconds[kind] += before.elapsed_time(event) / 1000
                before = event
            self._measured.append(dict(zip(KINDS, seconds, strict=True)))
            self._note(seconds, step.data_seconds)

    def ended_until(self, step: int) -> list[StepTimes]:
        """Steps up to this one that are over, each handed out once. The device has come past it."""
        found = []
        while self._ended and self._ended[0].number <= step:
            one = self._ended.popleft()
            host = dict(zip(KINDS, one.host, strict=False))
            found.append(StepTimes(one.number, host, _seconds_of(one.fetches) if self.on_gpu else None))
        return found

    def measured(self) -> list[dict[str, float]]:
        """On a GPU, the seconds by kind of the steps measured in detail since this was last asked."""
        found, self._measured = self._measured, []
        return found

    def since_last_step(self) -> dict[str, float]:
        """By kind, on the host's clock, up to where it last moved on."""
        return dict(zip(KINDS, self._step.host, strict=False)) if self._step is not None else {}

    # ---- inside a step

    def inside(self, kind: Literal["host_to_device", "forward", "backward"]) -> AbstractContextManager[None]:
        """What is done in a `with` of this is of this kind, whatever the phase; but for evaluations and saves."""
        return self._inside[kind]

    def waiting(self) -> _Waiting:
        """What is done inside waits for other ranks."""
        return self._waiting

    def waiting_for_device(self) -> AbstractContextManager[None]:
        """What is done inside waits for what the device has to do before it: the device does not wait."""
        return self._for_device if self.on_gpu else nullcontext()

    def backward(self) -> _Backward:
        """Around a backward pass that reduces gradients: after its last gradient it waits for others."""
        return self._backward

    def wait_begins(self) -> int | None:
        """None if it is inside another wait, which counts already."""
        self._depth += 1
        if self._depth > 1:
            return None
        now = time.monotonic()
        self.where.waiting_since = now
        return self._enter(_WAIT, now)

    def wait_ends(self, begun: int | None) -> None:
        self._depth -= 1
        if self._depth or begun is None:
            return
        self.where.waiting_since = None
        self._switch(_WAIT if self._after_last_gradient else begun, time.monotonic())

    def _on_last_gradient(self, parameter: torch.Tensor) -> None:
        now = time.monotonic()
        self.where.waiting_since = now
        self._after_last_gradient = True
        self._enter(_WAIT, now)

    def _after_backward(self) -> None:
        if self._after_last_gradient:
            self._after_last_gradient = False
            self.where.waiting_since = None
        self._switch(_OTHER, time.monotonic())

    def _enter(self, kind: int, now: float) -> int:
        """From now on it is of this kind, unless all that is done now counts as one. Returns what it was before."""
        before = self._kind
        if before in (_CHECKPOINT, _EVALUATION) and kind != _FOR_DEVICE:
            return before
        if kind == _COPY and self.on_gpu and (self._step is None or self._step.marks is None):
            return before  # it is a part of the fetching
        self._switch(kind, now)
        return before

    def _phase(self, phase: Phase, now: float) -> None:
        self._switch(_KIND_OF_PHASE.get(phase, _OTHER), now)

    def _switch(self, kind: int, now: float) -> None:
        before, step = self._kind, self._step
        if step is not None:
            step.host[before] += now - self._since
        self._since = now
        if kind == before:
            return
        self._kind = kind
        if self.on_switch is not None:
            self.on_switch(KINDS[kind] if kind != _FOR_DEVICE else "waiting_for_device")
        if not self.on_gpu or step is None or _FOR_DEVICE in (kind, before):
            return
        fetching = (kind in (_DATA, _COPY)) != (before in (_DATA, _COPY))
        if step.marks is not None or fetching:
            event = self._event()
            if step.marks is not None:
                step.marks.append((before, event))
            if fetching:
                step.fetches.append(event)

    def _next_step(self, mark: Event) -> _Step:
        self._number += 1
        measured = self.on_gpu and (self._number <= FIRST_GPU_STEPS or self._number % GPU_STEPS == 0)
        return _Step((mark or self._event()) if measured else None)

    def _event(self) -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _note(self, seconds: Sequence[float], data_seconds: float) -> None:
        work = sum(value for kind, value in enumerate(seconds) if kind not in _NOT_WORK)
        self._recent.append((work, data_seconds))


class _Waiting:
    """`with` this, once or inside itself. Not made of a generator, which would cost five times as much."""

    __slots__ = ("_begun", "_own")

    def __init__(self, own: OwnTime) -> None:
        self._own = own
        self._begun: list[int | None] = []

    def __enter__(self) -> None:
        self._begun.append(self._own.wait_begins())

    def __exit__(self, *error: object) -> None:
        self._own.wait_ends(self._begun.pop())


class _Inside(AbstractContextManager[None]):
    __slots__ = ("_before", "_kind", "_own")

    def __init__(self, own: OwnTime, kind: int) -> None:
        self._own, self._kind = own, kind
        self._before: list[int] = []

    def __enter__(self) -> None:
        now = time.monotonic()
        if self._kind == _FOR_DEVICE:
            self._own.where.waiting_since = now
            self._own._depth += 1  # what waits for others in there counts as this
        self._before.append(self._own._enter(self._kind, now))

    def __exit__(self, *error: object) -> None:
        if self._kind == _FOR_DEVICE:
            self._own.where.waiting_since = None
            self._own._depth -= 1
        self._own._switch(self._before.pop(), time.monotonic())


class _Backward:
    __slots__ = ("_own",)

    def __init__(self, own: OwnTime) -> None:
        self._own = own

    def __enter__(self) -> None:
        self._own._after_last_gradient = False
        self._own._enter(_BACKWARD, time.monotonic())

    def __exit__(self, *error: object) -> None:
        self._own._after_backward()


def _seconds_of(fetches: list[Event]) -> float:
    """Of the pairs of events that have passed."""
    pairs = zip(fetches[::2], fetches[1::2], strict=False)
    return float(sum(began.elapsed_time(ended) / 1000 for began, ended in pairs if ended.query()))
