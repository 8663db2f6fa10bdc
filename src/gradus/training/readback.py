"""Readback: numbers of a step, copied off the device while the next step runs and read one step late."""

from __future__ import annotations

import time
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

    _host: Tensor
    _copied: torch.cuda.Event | None
    _launched_at: float

    def wait(self) -> StepNumbers:
        """Blocks only if the device has not come that far; called a step late, it has."""
        done_at = self._launched_at  # a CPU has finished a step when the call returns
        if self._copied is not None:
            self._copied.synchronize()
            done_at = time.monotonic()
        loss_sum, count, grad_norm, overflow, before, after = self._host.tolist()
        return StepNumbers(
            loss=loss_sum / count if count else float("nan"),
            grad_norm=grad_norm if grad_norm >= 0 or grad_norm != grad_norm else None,
            overflow=overflow > 0,
            scale_before=before or None,
            scale_after=after or None,
            done_at=done_at,
        )


def start_readback(
    loss_sum: Tensor,
    count: Tensor,
    grad_norm: Tensor | None,
    overflow: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
) -> PendingNumbers:
    """Send the numbers of this step on their way without waiting for them."""
    absent = loss_sum.new_full((), -1.0)
    zero = loss_sum.new_zeros(())
    values = torch.stack(
        [
            loss_sum,
            count,
            absent if grad_norm is None else grad_norm.to(loss_sum.dtype),
            zero if overflow is None else overflow.to(loss_sum.dtype),
            *(s.to(loss_sum.dtype) for s in (scales or (zero, zero))),
        ]
    )
    if values.device.type != "cuda":
        return PendingNumbers(values, None, time.monotonic())
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return PendingNumbers(host, copied, time.monotonic())
