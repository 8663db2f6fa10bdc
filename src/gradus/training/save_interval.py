"""Save interval: when the next checkpoint is due, by steps, by the clock, or as often as pays (`auto`).

`auto` weighs what a checkpoint costs, which is how long training stood still for the last ones, against what a failure
costs, which is on average half of the work since the last checkpoint (Young 1974, Daly 2006: see planner/budget.py).
"""

from __future__ import annotations

import statistics
import time

from gradus.planner.budget import daly_interval
from gradus.schema.intervals import seconds_of

# The first checkpoint of `auto` is the one that shows what a checkpoint costs.
FIRST_SECONDS = 120.0
_REMEMBERED = 5  # the last few checkpoints: a disk may become slower, a model does not become larger


class SaveInterval:
    """The clock of rank 0; steps are counted by every rank alike."""

    def __init__(self, every: int | str, between_failures: float) -> None:
        self.every = every
        self._between_failures = between_failures
        self._stalls: list[float] = []
        self._seconds = FIRST_SECONDS if every == "auto" else seconds_of(every) if isinstance(every, str) else 0.0
        self._last = time.monotonic()

    @property
    def seconds(self) -> float | None:
        """Of an interval by the clock: from one checkpoint to the next."""
        return self._seconds if isinstance(self.every, str) else None

    def due_after(self, step: int) -> bool:
        """Whether a checkpoint of this step is due by the number of steps."""
        return isinstance(self.every, int) and step > 0 and step % self.every == 0

    def due_now(self) -> bool:
        """Whether one is due by the clock."""
        return isinstance(self.every, str) and time.monotonic() - self._last >= self._seconds

    def began(self) -> None:
        """A checkpoint was begun just now."""
        self._last = time.monotonic()

    def took(self, stall_seconds: float, until_committed_seconds: float) -> None:
        """What the last one cost. Before it is on the disk there is no sense in beginning another."""
        if self.every == "auto":
            self._stalls = [*self._stalls, stall_seconds][-_REMEMBERED:]
            best = daly_interval(statistics.median(self._stalls), self._between_failures)
            self._seconds = max(best, until_committed_seconds)
