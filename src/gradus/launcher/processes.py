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

from gradus.record.variables import ATTEMPT, RUN

_SWEEPER = "gradus.launcher.sweeper"
_TRIES = 50
_SWEEPER_SECONDS = 10.0


def marks(run: Path, attempt: int) -> dict[str, str]:
    """What every process of an attempt has in its environment, from its first moment on."""
    return {RUN: str(run), ATTEMPT: str(attempt)}


def attempt_processes(run: Path, attempt: int) -> list[int]:
    """All processes of an attempt: torchrun, ranks, their loader workers and whatever else they started."""
    wanted = {f"{name}={value}" for name, value in marks(run, attempt).items()}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # processes come and go, and some are not ours to read
            if wanted <= set(_environment(process)):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def rank_processes(torchrun: int) -> dict[int, int]:
    """Rank -> process id of the ranks that a torchrun has started and that are alive."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) != torchrun or state == "Z":
                continue
            rank = next((v.removeprefix("RANK=") for v in _environment(process) if v.startswith("RANK=")), None)
            if rank is not None:
                found[int(rank)] = int(process.name)
    return found


def kill_left_over(run: Path, attempt: int) -> list[int]:
    """Kill what is left of an attempt.

    torchrun forgets ranks that it was just starting when a signal ended it, and a killed torchrun leaves them all.
    """
    killed: list[int] = []
    for _ in range(_TRIES):  # one that is just being forked is found the next time
        found = attempt_processes(run, attempt)
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed += [pid for pid in found if pid not in killed]
        time.sleep(0.02)
    return killed


@contextlib.contextmanager
def swept(run: Path, attempt: int) -> Iterator[int]:
    """Nothing of the attempt is alive after this, even if this process and torchrun are both killed meanwhile.

    The file descriptor is to be passed on to torchrun: a small process of its own kills what is left of the attempt
    once nobody holds it any more.
    """
    reading, writing = os.pipe()
    try:
        sweeper = subprocess.Popen(
            [sys.executable, "-m", _SWEEPER, str(run), str(attempt)],
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
        kill_left_over(run, attempt)
        try:
            sweeper.wait(_SWEEPER_SECONDS)
        except subprocess.TimeoutExpired:
            sweeper.kill()
            sweeper.wait()


def _environment(process: Path) -> list[str]:
    return (process / "environ").read_bytes().decode(errors="replace").split("\0")
