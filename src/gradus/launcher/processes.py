"""Processes of an attempt: found by the marks in their environment, and none of them outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gradus.faults.children import children_of
from gradus.record.process import environment_of, processes
from gradus.record.variables import ATTEMPT, RUN

_SWEEPER = "gradus.launcher.sweeper"
_TRIES = 50
_SWEEPER_SECONDS = 10.0


def marks(run: Path, attempt: int) -> dict[str, str]:
    """What every process of an attempt has in its environment, from its first moment on."""
    return {RUN: str(run), ATTEMPT: str(attempt)}


def attempt_processes(run: Path, attempt: int, node: str | None = None, *, rank: int | None = None) -> list[int]:
    """All processes of an attempt here: torchrun, ranks, their loader workers and whatever else they started.

    With `node`, only those of that node of Slurm: one machine can be several. With `rank`, only those of one rank.
    """
    wanted = marks(run, attempt)
    wanted |= {"SLURMD_NODENAME": node} if node else {}
    wanted |= {"RANK": str(rank)} if rank is not None else {}
    found = [process.pid for process in processes() if wanted.items() <= environment_of(process.pid).items()]
    return [pid for pid in found if pid != os.getpid()]


def rank_processes(torchrun: int) -> dict[int, int]:
    """Rank -> process id of the ranks that a torchrun has started and that are alive."""
    ranks = {pid: environment_of(pid).get("RANK") for pid in children_of(torchrun)}
    return {int(rank): pid for pid, rank in ranks.items() if rank is not None}


def kill_left_over(run: Path, attempt: int, node: str | None = None, *, rank: int | None = None) -> list[int]:
    """Kill what is left of an attempt, of a node of it, or of one rank.

    torchrun forgets ranks that it was just starting when a signal ended it, and a killed torchrun leaves them all.
    """
    killed: list[int] = []
    for _ in range(_TRIES):  # one that is just being forked is found the next time
        found = attempt_processes(run, attempt, node, rank=rank)
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed += [pid for pid in found if pid not in killed]
        time.sleep(0.02)
    return killed


@contextlib.contextmanager
def swept(run: Path, attempt: int, node: str | None = None) -> Iterator[int]:
    """Nothing of the attempt is alive after this, even if this process and torchrun are both killed meanwhile.

    The file descriptor is to be passed on to torchrun: a small process of its own kills what is left of the attempt
    once nobody holds it any more.
    """
    reading, writing = os.pipe()
    try:
        sweeper = subprocess.Popen(
            [sys.executable, "-m", _SWEEPER, str(run), str(attempt), *([node] if node else [])],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends this process, or this terminal, does not end it
        )
    finally:
        os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)
        kill_left_over(run, attempt, node)
        try:
            sweeper.wait(_SWEEPER_SECONDS)
        except subprocess.TimeoutExpired:
            sweeper.kill()
            sweeper.wait()
