"""Watchdog: when a run hangs, and which rank it is that the others wait for. Decisions only; `watch` acts on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

from gradus.faults.announcements import NOTICE_STEPS
from gradus.faults.rank_report import RankReport
from gradus.faults.whereabouts import Phase, Whereabouts
from gradus.schema.intervals import seconds_of
from gradus.schema.recipe import WatchdogBlock

# A rank that has not said anything for so long does not run, or something in it holds Python's lock: as long as a run
# without a sign of life is shown as lost (record/status.py).
SILENT_SECONDS = 60.0
_WITHOUT_MEASURE: tuple[Phase, ...] = ("building", "staging", "loading", "saving", "compiling", "hooks", "own-code")


@dataclass(frozen=True)
class Patience:
    """For how long nothing may happen, by what ranks are doing. Infinite where nobody wants to be watched."""

    after: float  # times the median step, or evaluation batch
    at_least_seconds: float
    starting_seconds: float  # in phases without a measure

    @classmethod
    def of(cls, block: WatchdogBlock | None) -> Patience:
        if block is None:
            return cls(math.inf, math.inf, math.inf)
        return cls(block.after, seconds_of(block.at_least), seconds_of(block.starting))

    def seconds(self, phases: Sequence[Phase], where: Whereabouts) -> float:
        """With ranks in these phases: the longest of them, since others may be waiting for the rank that is in it."""
        return max((self._of(phase, where) for phase in phases), default=math.inf)

    def _of(self, phase: Phase, where: Whereabouts) -> float:
        if phase in ("debugging", "after-loop"):
            return math.inf
        if phase == "leaving":  # nobody waits for this one: how long it may take is up to the others
            return self.at_least_seconds
        measured = list(where.batch_seconds if phase == "evaluating" else where.step_seconds)
        if phase in _WITHOUT_MEASURE or not measured:  # the first of all compiles, and fills the loader
            return self.starting_seconds
        return max(self.at_least_seconds, self.after * median(measured))


class Stall:
    """For how long no rank has come on.

    Time counts only while the one who looks runs itself: a machine that was suspended, or a job that was stopped as a
    whole, did not hang.
    """

    def __init__(self, look_every_seconds: float) -> None:
        self._most_seconds = 3 * look_every_seconds
        self._last_look: float | None = None
        self._moves: dict[int, tuple[int, int]] = {}
        self._numbers: dict[int, int] = {}
        self.seconds = 0.0
        self.silent_seconds: dict[int, float] = {}

    def look(self, reports: Mapping[int, RankReport], now: float) -> None:
        passed = 0.0 if self._last_look is None else min(max(0.0, now - self._last_look), self._most_seconds)
        self._last_look = now
        moves = {rank: (report.step, report.moves) for rank, report in reports.items()}
        self.seconds = 0.0 if moves != self._moves else self.seconds + passed
        self._moves = moves
        for rank, report in reports.items():
            spoke = self._numbers.get(rank) != report.number
            self.silent_seconds[rank] = 0.0 if spoke else self.silent_seconds.get(rank, 0.0) + passed
            self._numbers[rank] = report.number

    def silent(self, reports: Mapping[int, RankReport], seconds: float = SILENT_SECONDS) -> set[int]:
        return {
            rank
            for rank, report in reports.items()
            if report.phase != "over" and self.silent_seconds.get(rank, 0.0) > seconds
        }


def phases_known(reports: Mapping[int, RankReport], silent: set[int]) -> list[Phase]:
    """What ranks are doing. One that has fallen silent further back than ranks can be apart has come on since then."""
    furthest = max((report.step for report in reports.values()), default=0)
    return [
        report.phase for rank, report in reports.items() if rank not in silent or furthest - report.step <= NOTICE_STEPS
    ]


@dataclass(frozen=True)
class Told:
    """What a rank says when it is asked where it is, or somebody on its node says of it."""

    rank: int
    place: str | None = None  # the innermost line of the user's own code, or else of ours
    state: str | None = None  # of a process that cannot speak: stopped, gone, ...
    collectives: int | None = None  # that its GPU has been given so far
    waits: bool = False  # for others, as its stack shows


@dataclass(frozen=True)
class Behind:
    """The rank that the others wait for, as far as can be told."""

    rank: int
    node: str | None  # None: it has never said anything
    how: str  # in words

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.node or 'an unknown node'}"


def behind(reports: Mapping[int, RankReport], silent: set[int], told: Mapping[int, Told]) -> Behind:
    """One that says nothing; else one that does not wait for others; else the one that has come least far."""
    alive = {rank: report for rank, report in reports.items() if report.phase != "over"} or dict(reports)
    dumb = sorted(rank for rank in silent if rank in alive)
    working = sorted(rank for rank in alive if rank not in silent and not _waits(alive[rank], told.get(rank)))
    given = {rank: told[rank].collectives or 0 for rank in alive if rank in told}
    least = min(alive, key=lambda rank: (alive[rank].step, alive[rank].moves, rank))
    if dumb:
        found = dumb[0]
        state = told[found].state if found in told else None
        why = f"{state or 'it says nothing any more'}, and was last seen "
        more = _and_more(len(dumb), "that say nothing")
    elif working and len(working) < len(alive):
        found = min(working, key=lambda rank: (alive[rank].step, alive[rank].moves, rank))
        why, more = "", _and_more(len(working), "that do not wait for others")
    elif len(given) == len(alive) and len(set(given.values())) > 1:
        found = min(given, key=lambda rank: (given[rank], rank))
        why = f"its GPU was given {given[found]} collectives, another one {max(given.values())}; it is "
        more = ""
    elif len(alive) == 1 or alive[least].step < max(report.step for report in alive.values()):
        found, why, more = least, "", ""
    else:
        found, more = least, ""
        why = "none is further than another, and this is the first that " + ("works" if working else "waits") + "; "
    return Behind(found, alive[found].node, f"{why}{doing(alive[found], told.get(found))}{more}")


def _waits(report: RankReport, told: Told | None) -> bool:
    return report.waiting_seconds is not None or (told is not None and told.waits)


def is_collective_timeout(error: BaseException) -> bool:
    """Whether torch gave up waiting for other ranks; user code has timeouts of its own."""
    text = str(error).lower()
    of_torch = isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text
    if isinstance(error, RuntimeError) and of_torch and ("timed out" in text or "timeout" in text):
        return True
    return error.__cause__ is not None and is_collective_timeout(error.__cause__)


def is_lost_peer(error: BaseException) -> bool:
    """Whether torch found another rank gone, which has its own reason; in a hook's code as anywhere."""
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
        return True
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_A_LOST_PEER):
        return True
    return error.__cause__ is not None and is_lost_peer(error.__cause__)


_SIGNS_OF_A_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo")


_WORDS: dict[str, str] = {
    "forward-backward": "in the forward or backward pass",
    "data": "waiting for data",
    "optimizer": "in the optimizer",
    "between-steps": "between two steps",
    "hooks": "in a hook",
    "own-code": "in the script, between two steps",
    "building": "building the model",
    "staging": "staging data",
    "loading": "loading a checkpoint",
    "leaving": "after its loop",
}


def doing(report: RankReport, told: Told | None = None) -> str:
    place = f", at {told.place}" if told is not None and told.place else ""
    in_step = f" of step {report.step + 1}" if report.phase in ("data", "forward-backward", "optimizer") else ""
    return f"{_WORDS.get(report.phase, report.phase)}{in_step} for {report.phase_seconds:.0f} s{place}"


def _and_more(count: int, which: str) -> str:
    return f" (as are {count - 1} more {which})" if count > 1 else ""
