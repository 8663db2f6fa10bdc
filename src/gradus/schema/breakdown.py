"""Breakdown: where the time of a rank's steps went, as a line of `timings/rank-<r>.jsonl`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

# Of a step's wall-clock time. What the device does while the host waits for something else counts once: as what the
# step would have been shorter without.
KINDS = (
    "data",  # waiting for a batch
    "host_to_device",  # copying it
    "forward",
    "backward",
    "exposed_communication",  # waiting for other ranks and for transfers that nothing else hides
    "optimizer",
    "checkpoint",  # what saving takes from the training loop; what is written meanwhile costs nothing
    "evaluation",
    "other",  # the rest: hooks, logging, an own loop's code between steps
)

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Breakdown(BaseModel):
    """Means over the steps of one log window of one rank. `seconds` add up to `step_seconds`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    time: float  # unix time at which it was written
    attempt: int
    rank: int
    node: str
    step: int  # the last one of the window, from 1
    steps: int = Field(ge=1)
    measured_steps: int  # of them, those measured in detail: all on a CPU, some on a GPU
    step_seconds: Seconds  # wall clock, checkpoint stalls and evaluations included
    seconds: dict[str, Seconds]
    own_seconds: float | None = None  # work of this rank itself, without waiting for others
    memory_peak_bytes: int | None = None
    memory_reserved_bytes: int | None = None  # held by the caching allocator of a GPU
    memory_retries: int | None = None  # allocations that had to be tried again so far: a sign of fragmentation

    @field_validator("seconds")
    @classmethod
    def _known(cls, seconds: dict[str, float]) -> dict[str, float]:
        """Kinds of a later version go to the rest, so that the sum stays."""
        known = {kind: seconds[kind] for kind in KINDS if kind in seconds}
        strange = sum(value for kind, value in seconds.items() if kind not in KINDS)
        return {**known, "other": known.get("other", 0.0) + strange} if strange else known

    def share(self, kind: str) -> float:
        """Of the step's time."""
        return self.seconds.get(kind, 0.0) / self.step_seconds if self.step_seconds > 0 else 0.0
