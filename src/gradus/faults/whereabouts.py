"""Whereabouts: where a rank is, kept by the thread that trains at the cost of a few assignments, and read by others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

Phase = Literal[
    "building",
    "staging",
    "loading",
    "between-steps",
    "data",
    "forward-backward",
    "optimizer",
    "evaluating",
    "saving",
    "hooks",  # of the user's, but for those of each step, which are between steps
    "own-code",  # between the steps of an own loop, where a script may do anything
    "compiling",  # seen from outside, in the stack of the thread: nothing else knows when a compiler sets in
    "debugging",
    "after-loop",  # an own loop was left, and its script goes on
    "leaving",  # ... and waits until all ranks have left it
    "over",
]
_RECENT = 32  # steps or evaluation batches whose seconds are kept: enough for a median


class Whereabouts:
    """The step and phase of a rank, since when, and whether it waits for others there."""

    def __init__(self, step: int = 0) -> None:
        self.step = step  # optimizer steps done
        self.phase: Phase = "building"
        self.since = time.monotonic()
        self.moves = 0  # changes whenever this rank comes on, be it by one batch of an evaluation
        self.waiting_since: float | None = None  # in a collective or for the device
        self.step_seconds: deque[float] = deque(maxlen=_RECENT)
        self.batch_seconds: deque[float] = deque(maxlen=_RECENT)  # of evaluations
        self._stepped_at: float | None = None
        self.on_enter: Callable[[Phase, float], None] | None = None  # told of each change, and when it was

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.since = time.monotonic()
        self.moves += 1
        if self.on_enter is not None:
            self.on_enter(phase, self.since)

    def stepped(self, step: int) -> None:
        """An optimizer step is done, or launched where a device runs behind."""
        now = time.monotonic()
        if self._stepped_at is not None:
            self.step_seconds.append(now - self._stepped_at)
        self._stepped_at = now
        self.step = step
        self.enter("between-steps")

    def elsewhere(self) -> None:
        """What was done since the last step is no part of one: the next one's seconds count from here."""
        self._stepped_at = time.monotonic()
        self.enter("between-steps")

    def batch(self) -> None:
        """One more batch of an evaluation begins."""
        now = time.monotonic()
        if self.phase == "evaluating":
            self.batch_seconds.append(now - self.since)
        self.enter("evaluating")
