"""Watcher: the one rank that watches over all: who is slow, who says nothing, and for whom the others wait in a hang.

    every rank ── report ──▶ store ──▶ watcher: health.json, stragglers, hangs
        ▲                                 │
        └── orders: tell your stacks; leave

Every rank has one and may become the one that uses it; `watch` says when, and acts for a rank that does not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gradus.faults.health import write_health
from gradus.faults.rank_report import Exchange, RankReport
from gradus.faults.stack_files import StackFiles, within
from gradus.faults.stragglers import Stragglers
from gradus.faults.watchdog import SILENT_SECONDS, Behind, Patience, Stall, Told, behind, phases_known
from gradus.faults.whereabouts import Whereabouts
from gradus.parallel.world import World
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter, rank_writer
from gradus.record.outcome import write_outcome
from gradus.schema.errors import EXIT_FAILED


@dataclass(frozen=True)
class Rhythm:
    """How often things are done. Tests have less patience."""

    report_seconds: float = 5.0  # two small messages of each rank: 400 a second for a thousand ranks
    health_seconds: float = 10.0
    silent_seconds: float = SILENT_SECONDS
    order_seconds: float = 0.2  # between two looks, once there was an order
    answer_seconds: float = 15.0  # that ranks get to tell where they are
    commit_seconds: float = 15.0  # that a checkpoint gets which is being written when a hang is found
    leave_seconds: float = 3.0  # that others get to leave before the one that holds the store does
    lost_seconds: float = 60.0  # without the store until a rank leaves by itself

    @classmethod
    def for_patience(cls, patience: Patience) -> Rhythm:
        """Somebody who wants to know of a hang within seconds wants reports more often."""
        report_seconds = min(cls.report_seconds, max(0.1, patience.at_least_seconds / 4))
        silent_seconds = SILENT_SECONDS * report_seconds / cls.report_seconds
        return cls(report_seconds, min(cls.health_seconds, 2 * report_seconds), silent_seconds)


@dataclass(frozen=True)
class Rank:
    """What a watcher knows of the rank that it is in, and what it can have it do."""

    run: RunDirectory
    attempt: int
    world: World
    where: Whereabouts
    stacks: StackFiles
    exchange: Exchange | None  # None: it is alone
    report: Callable[[], RankReport]  # says how it is now, to all
    is_closed: Callable[[], bool]  # whether it is about to end in order
    being_written: Callable[[], Path | None]  # a file that is there once the checkpoint being written is complete
    tell: Callable[..., None]  # writes an event, on rank 0


class Watcher:
    def __init__(self, rank: Rank, patience: Patience, rhythm: Rhythm) -> None:
        self._rank, self._patience, self._rhythm = rank, patience, rhythm
        self._stall = Stall(rhythm.report_seconds)
        self._stragglers = Stragglers()
        self._beat = 0
        self._health_at = 0.0
        self.found_hang = False

    def look(self, reports: dict[int, RankReport]) -> bool:
        """Take in what ranks have said by now. True: the run hangs, that is told, and this rank is to leave as well."""
        now = time.monotonic()
        self._stall.look(reports, now)
        silent = self._stall.silent(reports, self._rhythm.silent_seconds)
        if now >= self._health_at:
            self._health_at = now + self._rhythm.health_seconds
            write_health(self._rank.run, reports, silent, self._stragglers.now)
        self._tell_of_stragglers({rank: one for rank, one in reports.items() if rank not in silent})
        self._order({})
        late_to_start = self._stall.seconds > self._patience.starting_seconds
        if self._rank.world.size > len(reports) and not late_to_start:
            return False  # some rank has never said anything; that is a hang as well, when its time to start is over
        suspected = self._rank.exchange.suspicion() if self._rank.exchange is not None else None
        limit = self._patience.seconds(phases_known(reports, silent), self._rank.where)
        if (suspected or self._stall.seconds > limit) and not self._over(reports):
            return self._hang(reports, suspected)
        return False

    def write_down(self, fields: Mapping[str, Any]) -> None:
        """The end of the attempt, for whoever reads its events, its outcome or its log."""
        error = dict(fields)

        def write() -> None:
            self._event("fault", **error)
            write_outcome(
                self._rank.run, self._rank.attempt, {"state": "failed", "exit_code": EXIT_FAILED, "error": error}
            )
            print(f"gradus: {error['message']}", file=sys.stderr, flush=True)

        within(self._rhythm.answer_seconds, write)

    def _tell_of_stragglers(self, reports: Mapping[int, RankReport]) -> None:
        for change in self._stragglers.look(reports):
            one = change.straggler
            fields = {"rank": one.rank, "node": one.node, "ratio": one.ratio, "since_step": one.since_step}
            kind = "straggler" if change.begins else "straggler-recovered"
            self._event(kind, step=change.step, why=one.why, message=change.message, **fields)

    def _over(self, reports: Mapping[int, RankReport]) -> bool:
        return self._rank.is_closed() or all(report.phase == "over" for report in reports.values())

    def _order(self, order: Mapping[str, Any]) -> None:
        """Also without anything to do: it is by this that others know that somebody watches."""
        if self._rank.exchange is not None:
            self._beat += 1
            self._rank.exchange.give_order({"by": self._rank.world.rank, "beat": self._beat, **order})

    def _hang(self, reports: dict[int, RankReport], suspected: str | None) -> bool:
        """Find out who is behind, write it down, and end the attempt, unless it comes on after all."""
        self.found_hang = True
        told = self._asked(reports, self._stall.silent(reports, 3 * self._rhythm.report_seconds))
        reports = self._fresh(reports)
        if self._over(reports):
            return False
        missing = sorted(set(range(self._rank.world.size)) - set(reports))
        silent = {rank for rank in reports if rank not in told or told[rank].state is not None}
        found = behind(reports, silent, told)
        if missing:
            found = Behind(missing[0], None, "it has never said anything")
        fields = self._fields(reports, found, suspected)
        self._let_commit()
        if self._over(reports):  # it came on after all, and has ended meanwhile
            return False
        self.write_down(fields)
        self._order({"do": "leave"})
        time.sleep(self._rhythm.leave_seconds if self._rank.exchange is not None else 0.0)
        return True

    def _fresh(self, reports: dict[int, RankReport]) -> dict[int, RankReport]:
        """What ranks say now that they were asked. The last time may be a while ago: before the step that hangs."""
        mine, exchange = self._rank.report(), self._rank.exchange
        return {**reports, **(exchange.reports() if exchange is not None else {self._rank.world.rank: mine})}

    def _asked(self, reports: dict[int, RankReport], silent: set[int]) -> dict[int, Told]:
        """The stacks of all ranks are in their files after this, as far as they can be had."""
        mine, exchange, stacks = self._rank.world.rank, self._rank.exchange, self._rank.stacks
        if exchange is None:
            return {mine: stacks.of_this_rank()}
        speaking = [rank for rank in reports if rank not in silent]
        ask: dict[str, list[tuple[int, int]]] = {}
        for rank in silent:
            beside = [other for other in speaking if reports[other].node == reports[rank].node]
            if beside:
                ask.setdefault(str(min(beside)), []).append((rank, reports[rank].pid))
        self._order({"do": "tell", "ask": ask})
        told = {mine: stacks.of_this_rank()}
        for rank, pid in ask.get(str(mine), []):
            told[rank] = stacks.of_silent_rank(rank, pid)
        wanted = {rank for rank in reports if rank not in told}
        deadline = time.monotonic() + self._rhythm.answer_seconds
        while wanted and time.monotonic() < deadline:
            for document in exchange.answers(wanted):
                answer = Told(**document)
                told[answer.rank] = answer
                wanted.discard(answer.rank)
            if wanted:
                time.sleep(self._rhythm.order_seconds)
        return told

    def _fields(self, reports: Mapping[int, RankReport], found: Behind, suspected: str | None) -> dict[str, Any]:
        seconds = self._stall.seconds
        if suspected is not None and found.rank in reports:  # others may have come on until it was noticed
            seconds = max(seconds, reports[found.rank].phase_seconds)
        step = max(report.step for report in reports.values())
        usual = median(self._rank.where.step_seconds) if self._rank.where.step_seconds else None
        why = suspected or f"no rank has come on for {seconds:.0f} s"
        compared = f", where a step takes {usual:.3g} s" if usual is not None else ""
        folder = self._rank.stacks.folder.relative_to(self._rank.run.path)
        return {
            "kind": "hang",
            "message": f"the run hangs at step {step + 1}: {why}{compared}. {found.who} is behind: {found.how}",
            "hint": f"where each rank is, is in {folder}; of this one in {folder}/rank-{found.rank}.txt. "
            "A run that is slow and does not hang needs more patience: watchdog.at_least, watchdog.starting",
            "rank": found.rank,
            "node": found.node,
            "step": step,
            "seconds": seconds,
            "stacks": f"{folder}/rank-{found.rank}.txt",
        }

    def _let_commit(self) -> None:
        """A checkpoint that is being written is a good one all the same, if it is not what hangs."""
        deadline = time.monotonic() + self._rhythm.commit_seconds
        while (file := self._rank.being_written()) is not None and not file.exists() and time.monotonic() < deadline:
            time.sleep(self._rhythm.order_seconds)

    def _event(self, event: str, **fields: Any) -> None:
        rank = self._rank
        if rank.world.leads:
            rank.tell(event, **fields)
            return
        events = EventWriter(rank.run, rank_writer(rank.attempt, rank.world.rank))
        events.write(event, attempt=rank.attempt, **fields)
        events.close()
