"""Readback: numbers of a step, copied off the device while the next step runs and read one step late."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

EXPERT_NUMBERS = ("expert_load_max_over_mean", "tokens_dropped")


@dataclass(frozen=True)
class StepNumbers:
    """What a step computed, as plain numbers."""

    loss_sum: float  # over the global batch
    count: float  # of valid tokens or samples in it
    grad_norm: float | None
    overflow: bool  # fp16 only: gradients too large for it, and the step was skipped
    scale_before: float | None
    scale_after: float | None
    done_at: float  # time.monotonic() when the device had finished the step
    experts: Mapping[str, float] = field(default_factory=dict)  # of a mixture of experts: how busy they were
    not_finite: bool = False  # with a guard: the loss or a gradient was no number, on one rank at least

    @property
    def loss(self) -> float:
        """The mean over the global batch."""
        return self.loss_sum / self.count if self.count else float("nan")


@dataclass(frozen=True)
class Summing:
    """Loss sum and count, in one tensor, that are being summed over ranks while they go on."""

    sums: Tensor
    work: dist.Work | None

    def wait(self) -> tuple[float, float]:
        # On a stream of its own: on the usual one it would wait for the step that was launched since.
        device = self.sums.device
        aside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(aside) if aside is not None else nullcontext():
            if self.work is not None:
                self.work.wait()
            loss_sum, count = self.sums.tolist()
        return loss_sum, count


@dataclass
class PendingNumbers:
    """The same while still on its way to the host."""

    _names: list[str]
    _host: Tensor
    _copied: torch.cuda.Event | None
    _launched_at: float
    _summing: Summing | None = None

    def wait(self) -> StepNumbers:
        """Blocks only if the device has not come that far; called a step late, it has."""
        done_at = self._launched_at  # a CPU has finished a step when the call returns
        if self._copied is not None:
            self._copied.synchronize()
            done_at = time.monotonic()
        values = dict(zip(self._names, self._host.tolist(), strict=True))
        if self._summing is not None:
            values["loss_sum"], values["count"] = self._summing.wait()
        return StepNumbers(
            loss_sum=values["loss_sum"],
            count=values["count"],
            grad_norm=values.get("grad_norm"),
            overflow=values.get("overflow", 0.0) > 0,
            scale_before=values.get("scale_before"),
            scale_after=values.get("scale_after"),
            done_at=done_at,
            experts={name: values[name] for name in EXPERT_NUMBERS if name in values},
            not_finite=values.get("not_finite", 0.0) > 0,
        )


class Readback:
    """Sends the numbers of steps to the host. At most two steps may be on their way at a time."""

    _SLOTS = 3  # one more than are on their way: pinned memory is made once, not at every step

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._slots: dict[tuple[int, torch.dtype], Iterator[tuple[Tensor, torch.cuda.Event]]] = {}

    def start(self, numbers: Mapping[str, Tensor], summing: Summing | None = None) -> PendingNumbers:
        """Send the numbers of this step on their way without waiting for them.

        With `summing`, loss sum and count are those over all ranks, and on their way there as well.
        """
        return self.send(list(numbers), torch.stack(list(numbers.values())), summing)

    def send(self, names: list[str], values: Tensor, summing: Summing | None = None) -> PendingNumbers:
        if not self._on_gpu:
            return PendingNumbers(names, values, None, time.monotonic(), summing)
        host, copied = next(self._slots_for(values))
        host.copy_(values, non_blocking=True)
        copied.record()
        return PendingNumbers(names, host, copied, time.monotonic(), summing)

    def _slots_for(self, values: Tensor) -> Iterator[tuple[Tensor, torch.cuda.Event]]:
        key = (values.numel(), values.dtype)
        if key not in self._slots:
            self._slots[key] = itertools.cycle(
                (torch.empty(key[0], dtype=key[1], pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
                for _ in range(self._SLOTS)
            )
        return self._slots[key]
