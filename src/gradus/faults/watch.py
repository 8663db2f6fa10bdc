"""Watch: the thread of each rank that says where the rank is, and does what the one asks for that watches over all.

Usually rank 0 watches. If it says nothing any more, because its process is stopped or something in it holds Python's
lock, the next one takes over. A run of one rank has nobody but its launcher for that (`silence`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gradus.faults.children import kill_descendants
from gradus.faults.from_outside import Teller
from gradus.faults.own_time import OwnTime
from gradus.faults.rank_report import Exchange, RankReport
from gradus.faults.stack_files import StackFiles
from gradus.faults.stacks import compiles_or_debugs, main_frame
from gradus.faults.watchdog import Patience, is_collective_timeout, is_lost_peer
from gradus.faults.watcher import Rank, Rhythm, Watcher
from gradus.faults.whereabouts import Phase, Whereabouts
from gradus.parallel.world import World
from gradus.record.directory import RunDirectory
from gradus.record.format import first_line
from gradus.record.node import node_name
from gradus.record.outcome import read_outcome
from gradus.record.variables import RUN
from gradus.schema.errors import EXIT_FAILED

LOST_PEER_SECONDS = 2.0  # that a rank has to say, beside its next report, that a collective timed out


class Watch:
    """The thread of one rank. `where` and `own` are for the thread that trains."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        world: World,
        tell: Callable[..., None],
        patience: Patience,
        *,
        being_written: Callable[[], Path | None] = lambda: None,
        more_stacks: Callable[[], str] = lambda: "",
        rhythm: Rhythm | None = None,
    ) -> None:
        """`tell(event, **fields)` writes an event on rank 0; `being_written` is a file that is there once the
        checkpoint that is being written is complete."""
        self.where = Whereabouts()
        self.own = OwnTime(self.where, world.device)
        self._run, self._attempt, self._world = run, attempt, world
        self._rhythm = rhythm or Rhythm.for_patience(patience)
        self._node = node_name()
        self._teller = Teller()
        folder = run.attempt_path(attempt) / "stacks"
        self._stacks = StackFiles(folder, world.rank, self._node, self.where, more_stacks)
        self._exchange = Exchange(world.store, world.size) if world.store is not None else None
        self._closed = threading.Event()
        about = (run, attempt, world, self.where, self._stacks, self._exchange)
        rank = Rank(*about, self._say, self._closed.is_set, being_written, tell)
        self._watcher = Watcher(rank, patience, self._rhythm)
        self._number = 0
        self._leads = world.leads
        self._beat_seen: tuple[int, int] = (-1, -1)
        self._beat_age = 0.0
        self._last_look: float | None = None
        self._unreachable_since: float | None = None
        self._ordered = False
        self._asked_at = -1
        self._suspected: str | None = None
        self._may_end = _is_of_its_own()
        self._open = True
        self._thread = threading.Thread(target=self._go, name="gradus-watch", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """The first step begins."""
        self.where.elsewhere()
        self.own.start()

    def stepped(self, step: int, data_seconds: float) -> None:
        """A step is done, or on its way to the device."""
        self.own.stepped(step, data_seconds)
        self.where.stepped(step)

    def elsewhere(self) -> None:
        """What was done since the last step is no part of one."""
        self.where.elsewhere()
        self.own.elsewhere()

    def close(self) -> None:
        """The rank is about to end in order: nobody shall miss it. Nothing of it stays: neither thread nor world."""
        if not self._open:
            return
        self._open = False
        self.where.enter("over")
        self._closed.set()
        self._thread.join(2.0)  # it has one thing to say, and perhaps nobody to say it to
        self.own.close()
        self._teller.close()
        if not self._thread.is_alive():
            # Whoever still knows this object must not thereby hold the model, and with it the world, open.
            del self._world, self._stacks, self._exchange, self._watcher

    def explain(self, error: BaseException) -> None:
        """If a collective has timed out, let the one that watches find out for whom it waited.

        Of the ranks that waited, the first to give up closes its connections, and the others lose a peer by that: they
        say nothing until it has had its time.
        """
        if not self._open or self._exchange is None:
            return
        if not (is_collective_timeout(error) or is_lost_peer(error)):
            return
        self.where.waiting_since = time.monotonic()  # so it did, until now
        if is_collective_timeout(error):
            self._suspected = f"a collective timed out on rank {self._world.rank} ({first_line(error)})"
        elif not self._within(self._rhythm.report_seconds + LOST_PEER_SECONDS, self._is_suspected):
            return
        self._within(2 * self._rhythm.report_seconds + 2 * self._rhythm.answer_seconds, lambda: False)

    def _is_suspected(self) -> bool:
        assert self._exchange is not None
        try:
            return self._exchange.suspicion() is not None
        except RuntimeError:  # the store went with the peer
            return False

    def _within(self, seconds: float, happened: Callable[[], bool]) -> bool:
        """Wait for it, or until it is known how the attempt ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and read_outcome(self._run, self._attempt) is None:
            if happened():
                return True
            time.sleep(self._rhythm.order_seconds)
        return False

    # ---- the thread

    def _go(self) -> None:
        while True:
            try:
                self._look()
                self._unreachable_since = None
            except RuntimeError as error:  # the store: torch's own errors are all of this kind
                if self._closed.is_set():
                    return
                self._without_store(error)
            except OSError as error:
                print(f"gradus: the watchdog cannot write: {error}", file=sys.stderr, flush=True)
            soon = self._ordered or self._watcher.found_hang
            if self._closed.wait(self._rhythm.order_seconds if soon else self._rhythm.report_seconds):
                with contextlib.suppress(RuntimeError, OSError):
                    self._say()  # that it is over
                return

    def _look(self) -> None:
        report = self._say()
        if self._exchange is None:
            reports = {self._world.rank: report}
        else:
            order = self._exchange.order()
            if order is not None and order["by"] != self._world.rank:  # also after it was silent, and another took over
                self._leads = False
            if not self._leads:
                self._follow(order)
            if not self._leads:
                return
            reports = self._exchange.reports()
        if self._watcher.look(reports):
            self._leave()

    def _say(self) -> RankReport:
        self._number += 1
        where, own, now = self.where, self.own.seconds(), time.monotonic()
        phase: Phase = where.phase
        if phase != "over" and (seen := compiles_or_debugs(main_frame())) is not None:
            phase = seen
        waiting = where.waiting_since
        report = RankReport(
            number=self._number,
            rank=self._world.rank,
            node=self._node,
            pid=os.getpid(),
            step=where.step,
            moves=where.moves,
            phase=phase,
            phase_seconds=now - where.since,
            waiting_seconds=None if waiting is None else now - waiting,
            own_seconds=own.work if own else None,
            data_seconds=own.data if own else None,
            memory_peak_bytes=_peak_memory_bytes(self._world.device),
            kind=self._world.place.pipeline,
        )
        if self._exchange is not None:
            self._exchange.say(report)
            if self._suspected is not None:
                self._exchange.suspect(self._suspected)
        return report

    def _follow(self, order: Mapping[str, Any] | None) -> None:
        """Do what is asked; take over if nobody watches any more."""
        now = time.monotonic()
        passed = 0.0 if self._last_look is None else min(now - self._last_look, 3 * self._rhythm.report_seconds)
        self._last_look = now
        beat = (order["by"], order["beat"]) if order else (-1, -1)
        self._beat_age = 0.0 if beat != self._beat_seen else self._beat_age + passed
        self._beat_seen = beat
        if order is not None and order.get("do"):
            self._ordered = True
            self._obey(order)
        else:
            # Nobody watches any more. The ranks take turns, some reports apart, so that one of them takes over.
            turn = (self._world.rank - (order["by"] if order else 0)) % self._world.size - 1
            self._leads = self._beat_age > self._rhythm.silent_seconds + 2 * turn * self._rhythm.report_seconds

    def _obey(self, order: Mapping[str, Any]) -> None:
        assert self._exchange is not None
        if order["do"] == "leave":
            self._leave()
        self._exchange.answer(self._world.rank, asdict(self._stacks.of_this_rank()))
        if order["beat"] == self._asked_at:
            return
        self._asked_at = order["beat"]
        for rank, pid in order["ask"].get(str(self._world.rank), []):
            self._exchange.answer(rank, asdict(self._stacks.of_silent_rank(rank, pid)))

    def _without_store(self, error: RuntimeError) -> None:
        """Once there was an order, nobody is there any more who could wait for this rank."""
        now = time.monotonic()
        if self._unreachable_since is None:
            self._unreachable_since = now
        if self._ordered or self._watcher.found_hang:
            self._leave()
        if now - self._unreachable_since > self._rhythm.lost_seconds:
            fields = {
                "kind": "lost-peer",
                "message": f"rank {self._world.rank} on {self._node} cannot reach the store of the run, on the node of "
                f"rank 0, for {self._rhythm.lost_seconds:.0f} s: {error}",
                "hint": None,
                "rank": self._world.rank,
                "node": self._node,
            }
            self._watcher.write_down(fields)
            self._leave()

    def _leave(self) -> None:
        """End this process, whatever its main thread does, and what it has started; of somebody else's, only this
        thread: a notebook or a server in which a run was started is not ours to end."""
        self._stacks.finish()
        if not self._may_end:
            self._closed.set()
            return
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        for (
            pid
        ) in self._stacks.silent:  # else torchrun, whose signal they do not hear, waits for them for half a minute
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        kill_descendants(os.getpid())
        os._exit(EXIT_FAILED)


def _is_of_its_own() -> bool:
    """Whether this process is a rank and nothing else: one that a launcher has started."""
    return RUN in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
