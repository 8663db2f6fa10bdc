"""Drill requests: a file in a run's control folder that asks its launchers to do harm to the ranks of their node.

Whoever starts ranks also looks here once a second, so that a drill needs no way to another node but the shared folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gradus.launcher.processes import attempt_processes
from gradus.record.directory import RunDirectory

Harm = Literal["kill-rank", "kill-node", "hang", "slow-rank"]
_LOOK_EVERY_SECONDS = 1.0
_STOPPED_SECONDS, _RUNNING_SECONDS = 0.4, 0.2  # of a rank that is slowed: a third of the time for itself


@dataclass(frozen=True)
class DrillRequest:
    harm: Harm
    rank: int
    attempt: int
    id: str  # what was done once is not done again
    seconds: float = 60.0  # how long a rank is slowed


def request_path(run: RunDirectory) -> Path:
    return run.control / "drill.json"


def done_path(run: RunDirectory, request: DrillRequest) -> Path:
    return run.control / f"drill-{request.id}.done"


def ask_for(run: RunDirectory, request: DrillRequest) -> None:
    temporary = request_path(run).with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(request)))
    temporary.replace(request_path(run))


class DrillWatch:
    """Does what was asked for, if it is about a rank of this node and this attempt."""

    def __init__(self, run: RunDirectory, attempt: int, ranks: Callable[[], Mapping[int, int]]) -> None:
        self._run, self._attempt, self._ranks = run, attempt, ranks
        self._slowed: tuple[int, float] | None = None  # process, and until when
        self._next_turn = 0.0
        self._stopped = False
        self._look_at = 0.0

    def poll(self) -> None:
        """To be called often: it looks once a second, and has more to do while a rank is slowed."""
        if self._slowed is not None:
            self._slow()
            return
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_EVERY_SECONDS
        request = self._new()
        if request is None:
            return
        process = self._ranks().get(request.rank)
        if process is None:
            return
        done_path(self._run, request).write_text(str(time.time()))
        if request.harm == "slow-rank":
            self._slowed = (process, time.monotonic() + request.seconds)
            return
        victims = [process]
        if request.harm == "kill-node":  # whoever has started them
            victims = attempt_processes(self._run.path, self._attempt, os.environ.get("SLURMD_NODENAME"))
        for victim in victims:
            _send(victim, signal.SIGSTOP if request.harm == "hang" else signal.SIGKILL)
        if request.harm == "kill-node":
            os.kill(os.getpid(), signal.SIGKILL)  # whoever would tell of it dies with the node

    def _new(self) -> DrillRequest | None:
        try:
            request = DrillRequest(**json.loads(request_path(self._run).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        is_new = request.attempt == self._attempt and not done_path(self._run, request).exists()
        return request if is_new else None

    def _slow(self) -> None:
        assert self._slowed is not None
        process, until = self._slowed
        now = time.monotonic()
        if now > until:
            _send(process, signal.SIGCONT)
            self._slowed = None
        elif now >= self._next_turn:
            self._stopped = not self._stopped
            self._next_turn = now + (_STOPPED_SECONDS if self._stopped else _RUNNING_SECONDS)
            _send(process, signal.SIGSTOP if self._stopped else signal.SIGCONT)


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(process, number)
