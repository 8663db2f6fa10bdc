"""Stack files: where each rank of an attempt is, in `attempts/N/stacks/rank-K.txt`, once somebody wants to know."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gradus.faults.from_outside import PY_SPY_SECONDS, py_spy, stacks_of, state_of
from gradus.faults.stacks import collectives_of_gpu, place_in, python_stacks, told_here
from gradus.faults.watchdog import Told
from gradus.faults.whereabouts import Whereabouts
from gradus.record.format import count_text

WRITE_SECONDS = 5.0  # that a write may take: the disk may be what hangs


class StackFiles:
    """Those that this rank writes: its own, and those of ranks beside it that cannot."""

    def __init__(self, folder: Path, rank: int, node: str, where: Whereabouts, more: Callable[[], str]) -> None:
        """`more` are stacks of further processes of this rank."""
        self.folder = folder
        self._rank, self._node, self._where, self._more = rank, node, where, more
        self.silent: list[int] = []  # processes of ranks beside this one that cannot end themselves
        self._own: Told | None = None
        self._native: threading.Thread | None = None

    def of_this_rank(self) -> Told:
        """Stacks of Python are written when this returns, those of native code are on their way. Once."""
        if self._own is not None:
            return self._own
        where, pid = self._where, os.getpid()
        self._own = told_here(self._rank)
        doing = f"{where.phase} for {time.monotonic() - where.since:.1f} s, {count_text(where.step, 'step')} done"
        heading = f"rank {self._rank} on {self._node}, process {pid}: {doing}\n\n"
        text = python_stacks()
        within(WRITE_SECONDS, lambda: self._keep(self._rank, "txt", heading + text))

        def rest() -> None:
            if (gpu := collectives_of_gpu()) is not None:
                self._keep(self._rank, "nccl.json", gpu[0].decode(errors="replace"))
            if more := self._more():
                self._keep(self._rank, "txt", more, append=True)
            if native := py_spy(pid):
                self._keep(self._rank, "txt", f"\nwith native code, from py-spy:\n{native}", append=True)

        self._native = started(rest)
        return self._own

    def of_silent_rank(self, rank: int, pid: int) -> Told:
        """Of one on this node that cannot write its own."""
        self.silent.append(pid)
        state, stacks = state_of(pid), stacks_of(pid)
        heading = f"rank {rank} on {self._node}, process {pid}: {state}\n\n"
        within(WRITE_SECONDS, lambda: self._keep(rank, "txt", heading + stacks))
        return Told(rank, place_in(stacks), state)

    def finish(self) -> None:
        """Wait for what is on its way."""
        if self._native is not None:
            self._native.join(PY_SPY_SECONDS + WRITE_SECONDS)

    def _keep(self, rank: int, kind: str, text: str, *, append: bool = False) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with (self.folder / f"rank-{rank}.{kind}").open("a" if append else "w") as file:
            file.write(text)


def within(seconds: float, do: Callable[[], None]) -> None:
    """Do what may hang as well, such as writing to a disk that is gone, and go on after so many seconds."""
    started(do).join(seconds)


def started(do: Callable[[], None]) -> threading.Thread:
    def done() -> None:
        try:
            do()
        except OSError as error:
            print(f"gradus: the watchdog cannot write: {error}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=done, name="gradus-stacks", daemon=True)
    thread.start()
    return thread
