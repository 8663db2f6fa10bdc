"""Departures: at which step each rank leaves an own loop, told before ranks do anything together after it.

A loop that all ranks leave alike is saved by all of them. One that a single rank leaves (`break`, `sys.exit(0)`) would
have that rank in the save and the others in a reduction of gradients, for as long as torch waits. So a rank that leaves
says at which step, and waits until all have said the same. One that still works is waited for, however long it takes;
but one that has not left, and waits for others itself, goes on without this one.
"""

from __future__ import annotations

import time
from contextlib import suppress

import torch.distributed as dist

from gradus.faults.rank_report import Exchange, RankReport
from gradus.faults.watchdog import doing
from gradus.parallel.world import World
from gradus.record.format import count_text
from gradus.schema.errors import GradusError

ALONE_SECONDS = 10.0  # that both ranks must have waited: two reports apart, and longer than the end of a step takes
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0  # between two looks at single ranks
_MOST_ASKED = 8  # of them at a time: a thousand ranks do this together


class LeftAlone(GradusError):
    """A rank left its loop, and another one did not, or at another step."""

    kind = "left-alone"

    def __init__(self, rank: int, step: int, other: int, does: str) -> None:
        super().__init__(
            f"rank {rank} left the loop after {count_text(step, 'step')} while rank {other} {does}",
            hint="every rank must go through the same batches. Where one of them decides to leave, tell the others in "
            "the same step (torch.distributed.broadcast, or all_reduce), and leave on all; what run.evaluate returns "
            "is the same everywhere",
            rank=rank,
            step=step,
        )


class Departures:
    def __init__(self, world: World) -> None:
        self._world = world
        self._number = 0  # of loops that were left

    def tell(self, step: int) -> None:
        """This rank has come to the end of the run after so many steps, and waits for nobody.

        One that has left already may have kept the store: then there is nobody to tell.
        """
        with suppress(RuntimeError):
            self._count(step)

    def _count(self, step: int) -> str | None:
        """Say that this rank leaves. Returns where those are counted who leave at the same step."""
        store = self._world.store
        if store is None:
            return None
        store.set(_key(self._number, self._world.rank), str(step))
        together = f"left-{self._number}-at-{step}"
        store.add(together, 1)
        self._number += 1
        return together

    def meet(self, step: int) -> None:
        """Tell, and wait until all others have left at the same step. Raises LeftAlone if they do not."""
        store, together = self._world.store, self._count(step)
        if store is None or together is None:
            return
        began = time.monotonic()
        next_look = began + _LOOK_SECONDS
        others = _Others(self._world, step, self._number - 1)
        while store.add(together, 0) < self._world.size:
            if time.monotonic() >= next_look:
                others.look(time.monotonic() - began)
                next_look = time.monotonic() + _LOOK_SECONDS
            time.sleep(_POLL_SECONDS)


class _Others:
    """Those whom a rank that left waits for."""

    def __init__(self, world: World, step: int, number: int) -> None:
        assert world.store is not None
        self._world, self._store, self._step, self._number = world, world.store, step, number
        self._exchange = Exchange(world.store, world.size)
        self._missing = [rank for rank in range(world.size) if rank != world.rank]
        self._first: dict[int, int] = {}  # by rank: the number of its report that was seen first

    def look(self, waited_seconds: float) -> None:
        """Raises if one of them will not come: it left at another step, goes on, or has ended otherwise."""
        asked = self._missing[:_MOST_ASKED]
        reports = self._exchange.reports(asked)  # before it is asked who left: who did so is then known to have
        for rank in asked:
            if self._store.check([_key(self._number, rank)]):
                theirs = int(self._store.get(_key(self._number, rank)))
                if theirs != self._step:
                    raise self._alone(rank, f"left it after {count_text(theirs, 'step')}")
                self._missing.remove(rank)
            elif rank in reports:
                self._judge(reports[rank], waited_seconds)

    def _judge(self, report: RankReport, waited_seconds: float) -> None:
        if report.phase == "over":  # it tells itself why
            raise dist.DistNetworkError(f"rank {report.rank} has ended, while rank {self._world.rank} waited for it")
        first = self._first.setdefault(report.rank, report.number)
        waits = min(waited_seconds, report.waiting_seconds or 0.0) >= ALONE_SECONDS
        if waits and report.number != first and report.phase != "after-loop":
            raise self._alone(report.rank, f"goes on, and waits for the others {doing(report)}")

    def _alone(self, rank: int, does: str) -> LeftAlone:
        return LeftAlone(self._world.rank, self._step, rank, does)


def _key(number: int, rank: int) -> str:
    return f"left-{number}-{rank}"
