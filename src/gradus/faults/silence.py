"""Silence: a launcher notices that its run says nothing any more, where no rank is left that could. No torch.

Rank 0 renews status.json every ten seconds from a thread of its own. If it does not, its process is stopped, or stuck
in native code that holds Python's lock, or cannot write. Other ranks notice that by themselves, and end the attempt
with a better explanation: a launcher waits longer than they do. A run of one rank has nobody else.
"""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path
from typing import Any

from gradus.faults.from_outside import stacks_of, state_of
from gradus.record.directory import RunDirectory
from gradus.record.node import node_name
from gradus.record.outcome import write_outcome
from gradus.record.status import LOST_AFTER, read_status
from gradus.schema.errors import EXIT_FAILED
from gradus.schema.intervals import seconds_of
from gradus.schema.recipe import Recipe

LOOK_SECONDS = 5.0


class Silence:
    """To be polled by a launcher while its ranks run. A run without a watchdog is never too silent."""

    def __init__(self, run: RunDirectory, attempt: int, recipe: Recipe | None, ranks: int) -> None:
        self._run, self._attempt, self._ranks = run, attempt, ranks
        self._block = recipe.watchdog if recipe is not None else None
        self._last_look = time.monotonic()
        self._seen: Any = None
        self._steps: set[int] = set()
        self._seconds = 0.0

    def noticed(self) -> bool:
        """Whether the run hangs silently. Then it is told in its outcome, and the launcher ends what is left of it."""
        now = time.monotonic()
        if self._block is None or now - self._last_look < LOOK_SECONDS:
            return False
        passed = min(now - self._last_look, 3 * LOOK_SECONDS)  # a machine that was suspended did not hang
        self._last_look = now
        status = read_status(self._run)
        if status is None or status.attempt != self._attempt or status.state != "running":
            return False
        self._steps.add(status.step)
        self._seconds = 0.0 if status.updated_at != self._seen else self._seconds + passed
        self._seen = status.updated_at
        if self._seconds <= self._patience_seconds or not _writable(self._run.control):
            return False
        self._tell(status.pid if status.host == socket.gethostname() else None, status.step)
        return True

    @property
    def _patience_seconds(self) -> float:
        assert self._block is not None
        silent, at_least = LOST_AFTER.total_seconds(), seconds_of(self._block.at_least)
        if len(self._steps) < 3:  # as long as nothing is known of its steps
            return silent + seconds_of(self._block.starting)
        return silent + at_least if self._ranks == 1 else 3 * silent + 2 * at_least

    def _tell(self, pid: int | None, step: int) -> None:
        state, stacks = "nothing is known of its process", None
        if pid is not None:
            state = state_of(pid)
            file = self._run.attempt_path(self._attempt) / "stacks" / "rank-0.txt"
            file.parent.mkdir(mode=0o700, exist_ok=True)
            file.write_text(f"rank 0 on {node_name()}, process {pid}: {state}\n\n{stacks_of(pid)}")
            stacks = str(file.relative_to(self._run.path))
        error = {
            "kind": "hang",
            "message": f"the run hangs at step {step + 1}: rank 0 says nothing for {self._seconds:.0f} s; {state}",
            "hint": f"see {stacks}" if stacks else None,
            "rank": 0,
            "node": node_name() if pid is not None else None,
            "step": step,
            "seconds": self._seconds,
            "stacks": stacks,
        }
        write_outcome(self._run, self._attempt, {"state": "failed", "exit_code": EXIT_FAILED, "error": error})


def _writable(folder: Path) -> bool:
    """Whether it is not the disk that keeps the run silent."""
    probe = folder / f".probe-{secrets.token_hex(4)}"
    try:
        probe.write_text("")
        probe.unlink()
    except OSError:
        return False
    return True
