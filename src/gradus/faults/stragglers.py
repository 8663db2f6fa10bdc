"""Stragglers: ranks that need longer for their own part of a step than others that do the same work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from gradus.faults.own_time import WINDOW
from gradus.faults.rank_report import RankReport

# A rank is slow from here on, and no longer slow below the second: in between it stays what it was, so that one on the
# edge is not told of again and again. Medians over 20 steps of equal ranks were up to 1.35 apart with 2 ranks, and for
# moments 1.9 with 4 (DDP on 2 cores that 15 other processes wanted as well, steps of 2 to 6 ms, November 2026): the
# latter is what must not last.
SLOW = 1.5
RECOVERED = 1.3
# Of a step, that the rank takes longer than others: below, there is nothing to gain, and in steps of a millisecond
# hardly anything can be told.
LEAST_SHARE = 0.1
# For so long it must have been slow before anybody is told: steps beyond those of the median, and gatherings of
# reports, which are seconds apart. Short steps come by the hundred meanwhile.
LASTING_STEPS = 10
LASTING_LOOKS = 3


@dataclass(frozen=True)
class Straggler:
    rank: int
    node: str
    ratio: float  # its own seconds over the median of the others
    since_step: int
    own_seconds: float
    others_seconds: float
    why: Literal["data loading", "computing"]

    @property
    def message(self) -> str:
        return (
            f"rank {self.rank} on {self.node} is {self.ratio:.1f} times as slow as the others since about step "
            f"{self.since_step}: its own part of a step takes {self.own_seconds:.3g} s, that of the others "
            f"{self.others_seconds:.3g} s; it is its {self.why}"
        )


@dataclass(frozen=True)
class Change:
    """A rank is found to be slow, or to be so no longer."""

    straggler: Straggler
    begins: bool
    step: int

    @property
    def message(self) -> str:
        one = self.straggler
        if self.begins:
            return one.message
        return f"rank {one.rank} on {one.node} is no longer slow at step {self.step}; it was from {one.since_step} on"


class Stragglers:
    """Who is slow, from one gathering of reports to the next."""

    def __init__(self, window: int = WINDOW, lasting_steps: int = LASTING_STEPS) -> None:
        self._window, self._lasting = window, lasting_steps
        self._first_seen: dict[int, int] = {}  # by rank: the step at which it was first seen to be slow
        self._looks: dict[int, int] = {}  # by rank: how often it was seen to be slow in a row
        self._told: dict[int, Straggler] = {}

    @property
    def now(self) -> list[Straggler]:
        return [self._told[rank] for rank in sorted(self._told)]

    def look(self, reports: Mapping[int, RankReport]) -> list[Change]:
        """What has changed by these reports."""
        changes: list[Change] = []
        for kind in {report.kind for report in reports.values()}:
            alike = {rank: report for rank, report in reports.items() if report.kind == kind}
            for rank, report in alike.items():
                change = self._look_at(rank, report, [other for other in alike.values() if other.rank != rank])
                if change is not None:
                    changes.append(change)
        return changes

    def _look_at(self, rank: int, report: RankReport, others: list[RankReport]) -> Change | None:
        theirs = [other.own_seconds for other in others if other.own_seconds is not None]
        if report.own_seconds is None or len(theirs) < len(others) or not theirs:
            return None
        usual = median(theirs)
        ratio = report.own_seconds / max(usual, 1e-9)
        told = self._told.get(rank)
        # The step takes as long as the slowest rank needs, and this is the slowest if it matters.
        slow = ratio >= (RECOVERED if told else SLOW) and report.own_seconds - usual >= LEAST_SHARE * report.own_seconds
        if not slow:
            self._first_seen.pop(rank, None)
            self._looks.pop(rank, None)
            if told is None:
                return None
            del self._told[rank]
            return Change(told, begins=False, step=report.step)
        # A median turns when half of its steps are slow.
        first = self._first_seen.setdefault(rank, report.step)
        self._looks[rank] = self._looks.get(rank, 0) + 1
        since = told.since_step if told else max(0, first - self._window // 2)
        found = Straggler(rank, report.node, ratio, since, report.own_seconds, usual, _why(report, others, usual))
        if told is not None:
            self._told[rank] = found
        elif report.step - first >= self._lasting and self._looks[rank] >= LASTING_LOOKS:
            self._told[rank] = found
            return Change(found, begins=True, step=report.step)
        return None


def _why(report: RankReport, others: list[RankReport], usual: float) -> Literal["data loading", "computing"]:
    assert report.own_seconds is not None
    data = (report.data_seconds or 0.0) - median([other.data_seconds or 0.0 for other in others])
    return "data loading" if data >= (report.own_seconds - usual) / 2 else "computing"
