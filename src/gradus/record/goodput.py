"""Goodput: the share of the allocated time that went into steps which the run kept, and where the rest went.

An attempt that goes on from a checkpoint discards what earlier ones did after it: those steps were lost. So is what was
rolled back. Time is allocated while an attempt has its nodes; waiting in a queue is counted beside it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from gradus.record.append_log import read_lines
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events

_TELL_STEP = ("checkpoint", "finish", "stop-request")
FORMULA = "seconds in steps that were kept ÷ seconds allocated"


@dataclass(frozen=True)
class Goodput:
    """Where allocated time went."""

    allocated_seconds: float
    kept_seconds: float
    lost_seconds: float  # in steps that had to be made again
    lost_steps: int
    starting_seconds: float  # until ranks were ready for their first step
    evaluation_seconds: float
    saving_seconds: float  # that training stood still for
    waiting_seconds: float  # between allocations: not allocated, and no part of the share
    attempts: int

    @property
    def share(self) -> float | None:
        """None where there is nothing to divide by, or no step was measured: of a script, say."""
        measured = self.kept_seconds + self.lost_seconds > 0
        return min(1.0, self.kept_seconds / self.allocated_seconds) if measured and self.allocated_seconds else None

    @property
    def other_seconds(self) -> float:
        known = self.kept_seconds + self.lost_seconds + self.starting_seconds
        return max(0.0, self.allocated_seconds - known - self.evaluation_seconds - self.saving_seconds)

    def document(self) -> dict[str, Any]:
        numbers = {name: round(value, 3) for name, value in vars(self).items()}
        return {"share": self.share, "formula": FORMULA, **numbers, "other_seconds": round(self.other_seconds, 3)}


@dataclass
class _Steps:
    """The seconds of one attempt's steps: each entry is the last step of a stretch, and the sum of seconds up to it."""

    last: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    begun: int | None = None  # not known before its ranks have said so
    told: int = 0  # a step that it came to by what events say; not all steps are logged
    lost_steps: int = 0  # by rolling back
    lost_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    saving_seconds: float = 0.0

    @property
    def reached(self) -> int:
        return max(self.last[-1] if self.last else 0, self.begun or 0, self.told)

    @property
    def total(self) -> float:
        return self.up_to(self.reached) + self.lost_seconds

    def add(self, step: int, step_seconds: float) -> None:
        begun = step - 1 if self.begun is None else min(self.begun, step - 1)
        before = self.last[-1] if self.last else begun
        if step > before:
            self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + (step - before) * step_seconds)
            self.last.append(step)

    def up_to(self, step: int) -> float:
        """The seconds of all steps up to one: of a stretch that goes on beyond it its part, and as many after all."""
        if not self.last:
            return 0.0
        at = min(bisect_left(self.last, step), len(self.last) - 1)
        first, before = (self.last[at - 1], self.seconds[at - 1]) if at else (self.begun or self.last[0] - 1, 0.0)
        share = (step - first) / max(1, self.last[at] - first)
        return before + max(0.0, share) * (self.seconds[at] - before)

    def roll_back(self, step: int) -> None:
        if self.last and self.last[-1] > step:
            kept, total = self.up_to(step), self.seconds[-1]
            self.lost_steps += self.last[-1] - step
            self.lost_seconds += total - kept
            at = bisect_left(self.last, step)
            del self.last[at:], self.seconds[at:]
            self.last.append(step)
            self.seconds.append(kept)
        self.told = min(self.told, step)


@dataclass
class _Span:
    """When an attempt was there, and in which allocation."""

    first: datetime
    last: datetime
    ready: datetime | None = None  # ranks were about to make their first step
    begun: int = 0
    allocation: str = ""


class GoodputMeter:
    """Takes in metrics and events as they come; a run of a million steps costs a few megabytes."""

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}
        self._spans: dict[int, _Span] = {}

    def add_events(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            attempt, when = event.get("attempt"), _moment(event.get("time"))
            if not isinstance(attempt, int) or when is None:
                continue
            span = self._spans.setdefault(attempt, _Span(when, when, allocation=f"attempt {attempt}"))
            span.first, span.last = min(span.first, when), max(span.last, when)
            steps = self._steps.setdefault(attempt, _Steps())
            if event.get("event") == "start" and span.ready is None:
                span.ready, span.begun = when, _whole(event.get("step")) or 0
                steps.begun = span.begun
            if event.get("event") in _TELL_STEP:
                steps.told = max(steps.told, _whole(event.get("step")) or 0)
            if event.get("job_id") is not None:
                span.allocation = f"job {event['job_id']} {event.get('restart', 0)}"

    def add_metrics(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            attempt = _whole(record.get("attempt")) or 0
            steps = self._steps.setdefault(attempt, _Steps())
            rolled_back = _whole(record.get("rolled_back_to"))
            if rolled_back is not None:
                steps.roll_back(rolled_back)
            step, seconds = _whole(record.get("step")), _number(record.get("step_seconds"))
            if step is not None and seconds is not None:
                steps.add(step, seconds)
            steps.evaluation_seconds += _number(record.get("evaluation_seconds")) or 0.0
            steps.saving_seconds += _number(record.get("checkpoint_stall_seconds")) or 0.0

    def goodput(
        self,
        *,
        attempts: Collection[int] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        running: int | None = None,
    ) -> Goodput:
        """Of all attempts, or of those named. `since` and `until`: when they had their nodes, where that is known.

        `until` otherwise is the end of the attempt that is `running`.
        """
        numbers = sorted(number for number in {*self._spans, *self._steps} if attempts is None or number in attempts)
        kept = lost = starting = evaluation = saving = 0.0
        lost_steps = 0
        for number in numbers:
            steps = self._steps.get(number, _Steps())
            later = [span.begun for other, span in self._spans.items() if other > number and span.ready is not None]
            keeps = min([steps.reached, *later])
            kept_here = steps.up_to(keeps)
            kept += kept_here
            lost += steps.total - kept_here
            lost_steps += steps.lost_steps + max(0, steps.reached - max(keeps, steps.begun or 0))
            evaluation += steps.evaluation_seconds
            saving += steps.saving_seconds
            span = self._spans.get(number)
            if span is not None and span.ready is not None:
                starting += (span.ready - span.first).total_seconds()
        allocated, waiting = self._allocated(numbers, since, until, running)
        return Goodput(allocated, kept, lost, lost_steps, starting, evaluation, saving, waiting, len(numbers))

    def _allocated(
        self, numbers: Collection[int], since: datetime | None, until: datetime | None, running: int | None
    ) -> tuple[float, float]:
        """Seconds with nodes, and seconds between allocations."""
        allocations: dict[str, list[tuple[float, float]]] = {}
        for number in numbers:
            span = self._spans.get(number)
            if span is not None:
                end = span.last.timestamp()
                if span.ready is not None and number in self._steps:
                    # One that was killed wrote nothing at its end; it lasted at least as long as its steps.
                    end = max(end, span.ready.timestamp() + self._steps[number].total)
                if number == running and until is not None:
                    end = max(end, until.timestamp())
                allocations.setdefault(span.allocation, []).append((span.first.timestamp(), end))
        if since is not None and until is not None:
            return max(0.0, (until - since).total_seconds()), 0.0
        spans = sorted(
            (min(first for first, _ in found), max(end for _, end in found)) for found in allocations.values()
        )
        allocated = sum(end - first for first, end in spans)
        waiting = sum(max(0.0, after[0] - before[1]) for before, after in pairwise(spans))
        return allocated, waiting


def run_goodput(run: RunDirectory, **of: Any) -> Goodput:
    """The goodput of a run as its files have it now; see `GoodputMeter.goodput` for what can be left out."""
    meter = GoodputMeter()
    meter.add_events(read_events(run))
    meter.add_metrics(read_lines(run.metrics_path).records)
    return meter.goodput(**of)


def _moment(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
