"""Readback: numbers of a step, copied off the device while the next step runs and read one step late."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepNumbers:
    """What a step computed, as plain numbers."""

    loss: float  # mean over the global batch
    grad_norm: float | None
    overflow: bool  # fp16 only: the step was skipped
    scale_before: float | None
    scale_after: float | None
    done_at: float  # time.monotonic() when the device had finished the step


@dataclass
class PendingNumbers:
    """The same while still on its way to the host."""

    _names: list[str]
    _host: Tensor
    _copied: torch.cuda.Event | None
    _launched_at: float

    def wait(self) -> StepNumbers:
        """Blocks only if the device has not come that far; called a step late, it has."""
        done_at = self._launched_at  # a CPU has finished a step when the call returns
        if self._copied is not None:
            self._copied.synchronize()
            done_at = time.monotonic()
        values = dict(zip(self._names, self._host.tolist(), strict=True))
        return StepNumbers(
            loss=values["loss_sum"] / values["count"] if values["count"] else float("nan"),
            grad_norm=values.get("grad_norm"),
            overflow=values.get("overflow", 0.0) > 0,
            scale_before=values.get("scale_before"),
            scale_after=values.get("scale_after"),
            done_at=done_at,
        )


class Readback:
    """Sends the numbers of steps to the host. At most two steps may be on their way at a time."""

    _SLOTS = 3  # one more than are on their way: pinned memory is made once, not at every step

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._slots: dict[tuple[int, torch.dtype], Iterator[tuple[Tensor, torch.cuda.Event]]] = {}

    def start(self, **numbers: Tensor | None) -> PendingNumbers:
        """Send the numbers of this step on their way, those that there are, without waiting for them."""
        known = {name: value for name, value in numbers.items() if value is not None}
        values = torch.stack(list(known.values()))
        if not self._on_gpu:
            return PendingNumbers(list(known), values, None, time.monotonic())
        host, copied = next(self._slots_for(values))
        host.copy_(values, non_blocking=True)
        copied.record()
        return PendingNumbers(list(known), host, copied, time.monotonic())

    def _slots_for(self, values: Tensor) -> Iterator[tuple[Tensor, torch.cuda.Event]]:
        key = (values.numel(), values.dtype)
        if key not in self._slots:
            self._slots[key] = itertools.cycle(
                (torch.empty(key[0], dtype=key[1], pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
                for _ in range(self._SLOTS)
            )
        return self._slots[key]
