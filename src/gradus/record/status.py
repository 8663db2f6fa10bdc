"""status.json: the state of a run now, and the heartbeat that keeps it fresh."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from gradus.record import strict_json
from gradus.record.directory import RunDirectory
from gradus.record.problem import OnProblem, report_on_stderr
from gradus.record.process import process_of

State = Literal["queued", "running", "stopped", "finished", "failed"]
LOST_AFTER = timedelta(seconds=60)


def _now() -> datetime:
    return datetime.now(timezone.utc)


@dataclass(frozen=True)
class Status:
    """What a glance at a run shows."""

    state: State
    step: int = 0
    steps_total: int | None = None
    attempt: int = 0
    goodput: float | None = None
    last_error: str | None = None
    host: str | None = None
    pid: int | None = None
    updated_at: datetime = field(default_factory=_now)


def write_status(run: RunDirectory, status: Status) -> str | None:
    """Replace status.json at once. Returns the problem if it could not be written."""
    document = {**asdict(status), "updated_at": status.updated_at.isoformat(timespec="milliseconds")}
    # Host and process are in the name: a launcher and a rank on another node may write at the same moment.
    temporary = run.path / f".status.{socket.gethostname()}.{os.getpid()}.tmp"
    try:
        # No fsync: after a power cut the heartbeat is stale anyway, and on a shared file system it can take seconds.
        temporary.write_text(strict_json.encode(document) + "\n")
        temporary.replace(run.status_path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return f"{run.status_path}: cannot write ({error.strerror})"
    return None


def read_status(run: RunDirectory) -> Status | None:
    """The status last written; None if there is none that can be read."""
    try:
        document = strict_json.decode(run.status_path.read_bytes())
        known = {f.name: document[f.name] for f in fields(Status) if f.name in document}
        return Status(**{**known, "updated_at": datetime.fromisoformat(document["updated_at"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def shown_state(status: Status, now: datetime | None = None) -> str:
    """The state as people see it: `running` without a sign of life for a minute is `lost`."""
    silent = (now or _now()) - status.updated_at
    return "lost" if status.state == "running" and silent > LOST_AFTER else status.state


def writer_is_gone(status: Status) -> bool:
    """Whether the process that wrote the status ran on this very machine and does not any more."""
    if status.host != socket.gethostname() or status.pid is None:
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    found = process_of(status.pid)
    return found is not None and found.has_ended


class Heartbeat:
    """Rewrites the status from a thread: soon after a change, at most once a second, at least every ten seconds.

    Training only ever sets a variable; it never waits for the file system. And a run that compiles for minutes, with
    nothing to update, is not taken for lost.
    """

    def __init__(
        self,
        run: RunDirectory,
        status: Status,
        on_problem: OnProblem = report_on_stderr,
        *,
        at_most_every_seconds: float = 1.0,
        at_least_every_seconds: float = 10.0,
    ) -> None:
        self._run = run
        self._status = replace(status, host=socket.gethostname(), pid=os.getpid())
        self._on_problem = on_problem
        self._shortest = at_most_every_seconds
        self._longest = at_least_every_seconds
        self._failing = False
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gradus-heartbeat", daemon=True)
        self._thread.start()

    def update(self, **changes: Any) -> None:
        """Change fields of the status; written shortly after."""
        self._status = replace(self._status, **changes)
        self._changed.set()

    def close(self, **changes: Any) -> str | None:
        """Stop beating and write the final status at once. Returns the problem if that failed."""
        self._closed.set()
        self._changed.set()
        self._thread.join()
        return write_status(self._run, replace(self._status, updated_at=_now(), **changes))

    def _beat(self) -> None:
        while True:
            self._changed.clear()
            problem = write_status(self._run, replace(self._status, updated_at=_now()))
            if problem and not self._failing:
                self._on_problem(problem)
            self._failing = problem is not None
            if self._closed.wait(self._shortest):
                return
            self._changed.wait(self._longest - self._shortest)
            if self._closed.is_set():
                return
