"""Own time: how long a rank works in a step, without what it waits for others.

Ranks that train together take the same time for a step, however slow one of them is: the others wait. So the time is
measured from the end of one step to the end of the next, and what was spent in waits is taken off. Waits are found
where they happen, in any mesh:

- in `Work.wait` and `wait_tensor` of torch, which all of its own collectives in Python end in (FSDP2, DTensor, pipeline
  stages, `torch.distributed` itself): both are replaced by functions that call them;
- from the last gradient of a backward pass to its end, which is where DDP, in C++, waits for its buckets;
- on a GPU, where FSDP2 makes a stream wait for another.

On a CPU, clocks are read. On a GPU, events are recorded in the stream where clocks would be read, and asked for their
distance a step later, when they have passed: the host never waits for the device for this.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from gradus.faults.whereabouts import Whereabouts

WINDOW = 20  # measured steps over which medians are taken: one slow step in many is not a slow rank
# Of the steps on a GPU, every so many: recording an event takes the host 2 to 4 microseconds, and a model that is
# sharded in 50 parts has 200 of them in a step.
GPU_STEPS = 10

Mark = Any  # a moment: time.monotonic(), or an event in the stream of a GPU


@dataclass(frozen=True)
class OwnSeconds:
    """Medians over the last measured steps."""

    work: float  # everything that this rank did by itself, data included
    data: float  # of it, waiting for data


class _Measured:
    """A step under measurement, or one whose events are still to come."""

    __slots__ = ("began", "data_seconds", "ended", "waits")

    def __init__(self, began: Mark) -> None:
        self.began: Mark = began
        self.ended: Mark = None
        self.waits: list[tuple[Mark, Mark]] = []
        self.data_seconds = 0.0


class OwnTime:
    """The own time of one rank's steps. The thread that trains calls; `seconds` may be asked for by others."""

    def __init__(self, where: Whereabouts, device: torch.device) -> None:
        self.where = where
        self._on_gpu = device.type == "cuda"
        self._mark: Callable[[], Mark] = _event if self._on_gpu else time.monotonic
        self._step: _Measured | None = None
        self._last_gradient: Mark = None
        self._pending: deque[_Measured] = deque()
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._hook: Any = None
        self._depth = 0
        self._number = 0
        self._waiting, self._backward = _Waiting(self), _Backward(self)
        self._uninstall = _install(self)

    def close(self) -> None:
        self._uninstall()
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

    def begin(self) -> None:
        """From here on, time belongs to the next step: the end of the one before, or of an evaluation or a save."""
        self._number += 1
        wanted = not self._on_gpu or self._number % GPU_STEPS == 0
        self._step = _Measured(self._mark()) if wanted else None

    def end(self, data_seconds: float) -> None:
        """A step is done, or on its way to the device. `begin` follows."""
        step, self._step = self._step, None
        if step is not None:
            step.ended, step.data_seconds = self._mark(), data_seconds
            self._pending.append(step)

    def settle(self) -> None:
        """Take in steps that the device has come past."""
        while self._pending and (not self._on_gpu or self._pending[0].ended.query()):
            step = self._pending.popleft()
            work = self._between(step.began, step.ended)
            for began, ended in step.waits:
                work -= self._between(began, ended)
            self._recent.append((max(0.0, work), step.data_seconds))

    def waiting(self) -> _Waiting:
        """What is done inside waits for other ranks."""
        return self._waiting

    def backward(self) -> _Backward:
        """Around a backward pass that reduces gradients: after its last gradient it waits for others."""
        return self._backward

    def _after_backward(self) -> None:
        last, self._last_gradient = self._last_gradient, None
        if last is not None:
            self.where.waiting_since = None
            if self._step is not None:
                self._step.waits.append((last, self._mark()))

    def _on_last_gradient(self, parameter: torch.Tensor) -> None:
        self.where.waiting_since = time.monotonic()
        self._last_gradient = self._mark() if self._step is not None else 0.0

    def _enter(self) -> Mark:
        """A wait begins; None if it is inside another one, which counts already."""
        self._depth += 1
        if self._depth > 1:
            return None
        self.where.waiting_since = time.monotonic()
        return self._mark() if self._step is not None else 0.0

    def _leave(self, began: Mark) -> None:
        self._depth -= 1
        if self._depth:
            return
        self.where.waiting_since = None
        if self._step is not None and began is not None and self._last_gradient is None:
            self._step.waits.append((began, self._mark()))

    def _between(self, first: Mark, last: Mark) -> float:
        seconds: float = first.elapsed_time(last) / 1000 if self._on_gpu else last - first
        return seconds


class _Waiting:
    """`with` this, once or inside itself. Not made of a generator, which would cost five times as much."""

    __slots__ = ("_began", "_own")

    def __init__(self, own: OwnTime) -> None:
        self._own = own
        self._began: list[Mark] = []

    def __enter__(self) -> None:
        self._began.append(self._own._enter())

    def __exit__(self, *error: object) -> None:
        self._own._leave(self._began.pop())


class _Backward:
    __slots__ = ("_own",)

    def __init__(self, own: OwnTime) -> None:
        self._own = own

    def __enter__(self) -> None:
        self._own._last_gradient = None

    def __exit__(self, *error: object) -> None:
        self._own._after_backward()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


_measuring: list[OwnTime] = []  # that of the run which is alive in this process; the last one counts
_originals: list[tuple[Any, str, Any]] = []


def _install(own: OwnTime) -> Callable[[], None]:
    _measuring.append(own)
    if not _originals:
        _replace(dist.Work, "wait", _timed)
        _replace(functional, "wait_tensor", _timed_unless_compiling)
        if own._on_gpu:
            for name in ("wait_for_unshard", "finalize_backward"):
                _replace(_fsdp_group(), name, _timed)

    def uninstall() -> None:
        if own in _measuring:
            _measuring.remove(own)
        if not _measuring:
            while _originals:
                owner, name, original = _originals.pop()
                setattr(owner, name, original)

    return uninstall


def _replace(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    original = getattr(owner, name, None)
    if original is not None:  # a later torch may do without it
        _originals.append((owner, name, original))
        setattr(owner, name, around(original))


def _fsdp_group() -> Any:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    return _fsdp_param_group.FSDPParamGroup


def _timed(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(*arguments: Any, **named: Any) -> Any:
        if not _measuring:
            return original(*arguments, **named)
        own = _measuring[-1]
        began = own._enter()
        try:
            return original(*arguments, **named)
        finally:
            own._leave(began)

    return wait


def _timed_unless_compiling(original: Callable[..., Any]) -> Callable[..., Any]:
    timed = _timed(original)

    def wait(tensor: Any) -> Any:
        return original(tensor) if torch.compiler.is_compiling() else timed(tensor)

    return wait
