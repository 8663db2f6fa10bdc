"""Tracking: a run's metrics sent on to a service, each line once, whoever sends them and however often it starts again.

The files of the run stay the truth. What a service was given is noted beside them, in `control/export-<kind>.json`, so
that a run that is queued again, or an export that is started again, goes on in the same run of the service.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

from gradus.record import lock, strict_json, timings
from gradus.record.append_log import LogTail
from gradus.record.directory import RunDirectory
from gradus.record.format import first_line
from gradus.record.metrics import merge_by_step
from gradus.record.outcome import read_outcome
from gradus.record.problem import OnProblem, report_on_stderr
from gradus.record.scalars import scalars
from gradus.record.status import read_status, shown_state
from gradus.schema.errors import GradusError, InputError

_ROWS_AT_ONCE = 200


@dataclass(frozen=True)
class Row:
    """The numbers of a step, and when they were logged."""

    step: int
    time: float
    numbers: Mapping[str, float]


class Tracker(Protocol):
    """One run of a service. It is opened again in each process that has something to add."""

    @property
    def id(self) -> str:
        """By which the service finds the run again."""

    @property
    def place(self) -> str:
        """Where a person looks at it."""

    def log(self, rows: Sequence[Row]) -> None: ...

    def discard(self, attempt: int, first: int, last: int) -> None:
        """Steps that it was given are no part of the run any more, and come again."""

    def close(self, state: str) -> None: ...


OpenTracker = Callable[[RunDirectory, str, "str | None"], Tracker]
"""Of a run, at a place, with the id it had there before."""


@dataclass(frozen=True)
class Sent:
    """What the service has of a run."""

    id: str
    offset: int = 0  # bytes of metrics.jsonl
    attempt: int = 0
    step: int = 0  # the last one
    state: str = ""  # that it was closed with


class TrackingExporter:
    """Follows a run. What cannot be sent now is sent by a later `poll`; training never waits for it."""

    def __init__(
        self,
        run: RunDirectory,
        kind: str,
        target: str,
        open_tracker: OpenTracker,
        on_problem: OnProblem = report_on_stderr,
    ) -> None:
        self.target = target
        self._run = run
        self._kind = kind
        self._open = open_tracker
        self._on_problem = on_problem
        self._tracker: Tracker | None = None
        self._lock: TextIO | None = _locked(run, kind)
        self._sent = _read(run, kind).get(target)
        self._times = _StepTimes(run)
        self._failing = False
        self.place = target
        """Where to look at what was sent."""

    def poll(self) -> None:
        """Send what is new. A service that does not answer is told of once, and asked again."""
        try:
            self.send()
        except Exception as error:  # whatever libraries of services raise
            if not self._failing:
                self._on_problem(f"{self._kind} export: {_words(error)}; what is not sent is tried again")
            self._failing = True
        else:
            if self._failing:
                self._on_problem(f"{self._kind} export: works again")
            self._failing = False

    def send(self) -> int:
        """Send what is new; how many steps that was. Raises what the service raises."""
        tail = LogTail(self._run.metrics_path, self._sent.offset if self._sent else 0)
        records = tail.poll()
        rows = merge_by_step(records)
        if not records:
            return 0
        tracker = self._tracker or self._opened()
        self._discard_what_comes_again(tracker, records)
        times = self._times.of(rows)
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[begin : begin + _ROWS_AT_ONCE]
            tracker.log([Row(row["step"], times[row["step"]], scalars(row)) for row in part])
        last = rows[-1] if rows else {}
        assert self._sent is not None
        self._note(
            replace(
                self._sent,
                offset=tail.offset,
                attempt=last.get("attempt", self._sent.attempt),
                step=last.get("step", self._sent.step),
            )
        )
        return len(rows)

    def close(self) -> None:
        """Say how the run stands. What could not be sent is left to the next export."""
        state = _state(self._run)
        try:
            if self._sent is not None and (self._tracker is not None or self._sent.state != state):
                (self._tracker or self._opened()).close(state)
                self._note(replace(self._sent, state=state))
        except Exception as error:
            self._on_problem(f"{self._kind} export: {_words(error)}")
        self.release()

    def release(self) -> None:
        self._tracker = None
        if self._lock is not None:
            lock.release(self._lock)
            self._lock = None

    def _opened(self) -> Tracker:
        self._tracker = self._open(self._run, self.target, self._sent.id if self._sent else None)
        self.place = self._tracker.place
        if self._sent is None:
            self._note(Sent(self._tracker.id))
        return self._tracker

    def _discard_what_comes_again(self, tracker: Tracker, records: Sequence[Mapping[str, Any]]) -> None:
        assert self._sent is not None
        firsts = [record["rolled_back_to"] + 1 for record in records if isinstance(record.get("rolled_back_to"), int)]
        firsts += [
            record["step"] for record in records if "step" in record and record.get("attempt", 0) > self._sent.attempt
        ]
        if firsts and min(firsts) <= self._sent.step:
            tracker.discard(self._sent.attempt, min(firsts), self._sent.step)

    def _note(self, sent: Sent) -> None:
        self._sent = sent
        known = {**_read(self._run, self._kind), self.target: sent}
        path = _path(self._run, self._kind)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(strict_json.pretty({target: asdict(one) for target, one in known.items()}) + "\n")
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._on_problem(f"{path}: cannot write ({error.strerror}); a later export may send some steps twice")


def export_once(exporter: TrackingExporter) -> int:
    """Send all that is new, and close. What the service refuses is an error here: somebody waits for it."""
    try:
        sent = exporter.send()
    except GradusError:
        exporter.release()
        raise
    except Exception as error:
        exporter.release()
        raise GradusError(f"cannot export to {exporter.target}: {_words(error)}", found=exporter.target) from error
    exporter.close()
    return sent


class _StepTimes:
    """When steps were logged, by what rank 0 wrote down; else when the file of metrics was last written to."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._tail = LogTail(run.path / timings.FOLDER / "rank-0.jsonl")
        self._known: dict[tuple[int, int], float] = {}

    def of(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
        for line in self._tail.poll():
            if isinstance(line.get("time"), (int, float)):
                self._known[(line.get("attempt", 0), line.get("step", 0))] = line["time"]
        try:
            otherwise = self._run.metrics_path.stat().st_mtime
        except OSError:
            otherwise = time.time()
        return {row["step"]: self._known.pop((row.get("attempt", 0), row["step"]), otherwise) for row in rows}


def _state(run: RunDirectory) -> str:
    """How the run stands. Ranks leave their outcome before the launcher writes the status."""
    outcome = read_outcome(run, max(run.attempts, default=0))
    if outcome is not None and outcome.get("state"):
        return str(outcome["state"])
    status = read_status(run)
    return shown_state(status) if status is not None else "unknown"


def _locked(run: RunDirectory, kind: str) -> TextIO:
    """Two exporters would each send everything."""
    return lock.held(
        run.control / f"export-{kind}.lock",
        InputError(
            f"{run.path}: another process exports this run to {kind}",
            hint="the run itself does so while it goes on, if its recipe has it under exporters",
            found=str(run.path),
        ),
    )


def _path(run: RunDirectory, kind: str) -> Path:
    return run.control / f"export-{kind}.json"


def _read(run: RunDirectory, kind: str) -> dict[str, Sent]:
    """By target."""
    try:
        document = strict_json.decode(_path(run, kind).read_bytes())
        return {target: Sent(**sent) for target, sent in document.items()}
    except (OSError, ValueError, TypeError):
        return {}


def _words(error: Exception) -> str:
    first = first_line(error)
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
