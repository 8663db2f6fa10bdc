"""Deadline: when the job that a run is in ends, as its environment says, and why a run must stop before. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

from gradus.record.variables import DEADLINE
from gradus.schema.errors import DoNotRestart

# Slurm sets it in a job's environment: the end of the allocation, in seconds since 1970.
SLURM_DEADLINE = "SLURM_JOB_END_TIME"


@dataclass
class Deadline:
    """The end, and how long before it a run must stop, which is better known with every step and every checkpoint."""

    at: float  # seconds since 1970
    lead_seconds: float = 0.0
    known_since: float = field(default_factory=time.time, compare=False)

    def reason(self) -> str | None:
        """Why the run must stop now, if it must."""
        left = self.at - time.time()
        if left > self.lead_seconds:
            return None
        ends = datetime.fromtimestamp(self.at, timezone.utc)
        return (
            f"the job ends at {ends:%H:%M:%S} UTC, in {max(0.0, left):.0f} s, and stopping and saving may take "
            f"{self.lead_seconds:.0f} s"
        )


def too_short(deadline: Deadline, step: int) -> DoNotRestart:
    """The error of a run that has to stop before it could make a step: after a requeue, it would again."""
    limit, left = deadline.at - deadline.known_since, max(0.0, deadline.at - time.time())
    return DoNotRestart(
        f"the time limit is too short for a single step: the run had {limit:.0f} s when it started, {left:.0f} s of "
        f"them are left before its first step, and stopping and saving may take {deadline.lead_seconds:.0f} s",
        hint="give it more time: a longer --time, or a longer limit of the job",
        step=step,
        limit_seconds=limit,
        left_seconds=left,
        lead_seconds=deadline.lead_seconds,
    )


def deadline_of(environment: Mapping[str, str] = os.environ) -> Deadline | None:
    """The earliest end that the environment names."""
    given = [float(value) for name in (DEADLINE, SLURM_DEADLINE) if _is_time(value := environment.get(name, ""))]
    return Deadline(min(given)) if given else None


def _is_time(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False
