"""Watching: how any run is now, local or on a cluster, from its files alone. Nothing is written."""

from __future__ import annotations

import json
import socket
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gradus.checkpoint.commit import COMMITTED
from gradus.checkpoint.manifest import committed_steps
from gradus.launcher.job_place import read_place
from gradus.launcher.ledger import Settled, read_ledger
from gradus.launcher.result import Result
from gradus.launcher.slurm.queue import queue, submissions
from gradus.launcher.slurm.standing import Standing, standing
from gradus.launcher.story import local_state
from gradus.launcher.verdict import GOES_ON
from gradus.record.append_log import LogTail
from gradus.record.directory import RunDirectory
from gradus.record.event_tails import EventTails
from gradus.record.format import duration_text
from gradus.record.goodput import Goodput, GoodputMeter
from gradus.record.loss_curve import LossCurve
from gradus.record.node_health import Health, read_health
from gradus.record.status import LOST_AFTER, Status, read_status, writer_is_gone
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from gradus.schema.prediction import PREDICTION_FILE

_RECENT_ROWS = 20
_KEPT_EVENTS = 50
_IS_OVER = ("finished", "failed", "stopped", "lost")
# Of each step or save; everything else that happens is worth a line.
_DULL_EVENTS = frozenset({"checkpoint-waits"})


@dataclass(frozen=True)
class Speed:
    """How fast it is, and how fast it was said to be."""

    unit: str  # tok or samples
    per_second: float
    predicted: float | None

    @property
    def share(self) -> float | None:
        return self.per_second / self.predicted if self.predicted else None


@dataclass(frozen=True)
class View:
    """All that is to be seen of a run at a moment. None is what nobody has written."""

    run: RunDirectory
    at: datetime
    state: str
    over: bool
    exit_code: int | None = None  # of a run that is over
    note: str | None = None  # why it waits, or what is odd
    attempt: int = 0
    job_id: str | None = None
    job_nodes: str | None = None
    starts_at: datetime | None = None
    ends_at: datetime | None = None  # the job's, if it has a limit
    step: int = 0
    steps_total: int | None = None
    loss: float | None = None
    losses: tuple[float, ...] = ()
    speed: Speed | None = None
    step_seconds: float | None = None
    eta_seconds: float | None = None
    goodput: Goodput | None = None
    saved_step: int | None = None
    saved_at: datetime | None = None
    attempts: tuple[Settled, ...] = ()
    health: Health | None = None
    last_error: str | None = None
    events: tuple[Mapping[str, Any], ...] = ()


@dataclass
class Watching:
    """Follows a run. What was read once is not read again, but for the small files that are replaced."""

    run: RunDirectory
    _metrics: LogTail = field(init=False)
    _event_tails: EventTails = field(init=False)
    _meter: GoodputMeter = field(default_factory=GoodputMeter)
    _curve: LossCurve = field(default_factory=LossCurve)
    _rows: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT_ROWS))
    _events: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))
    _steps_total: int | None = None
    _predicted: tuple[int, dict[str, Any]] = (0, {})

    def __post_init__(self) -> None:
        self._metrics, self._event_tails = LogTail(self.run.metrics_path), EventTails(self.run)

    def look(self) -> View:
        """How it is now."""
        now = datetime.now(timezone.utc)
        rows = self._metrics.poll()  # before the events: ranks say where they begin before they log a step
        self._take_in_events(self._event_tails.poll())
        self._take_in_metrics(rows)
        status = read_status(self.run)
        decided = read_ledger(self.run)
        attempt = max(self.run.attempts, default=0)
        stands = self._standing(status, settled=any(line.ended.attempt == attempt for line in decided))
        over = is_over(stands, decided, attempt) and not _may_come_back(stands, status, now)
        step = self._rows[-1]["step"] if self._rows else (status.step if status else 0)
        seconds = self._usual("step_seconds")
        saved = self._newest_checkpoint()
        # A run that is over has the goodput of its end; one that goes on, as of now.
        running = attempt if stands.state == "running" else None
        return View(
            run=self.run,
            at=now,
            state=stands.state,
            over=over,
            exit_code=exit_code_of(self.run, stands.state, decided, attempt) if over else None,
            note=_note(stands),
            attempt=attempt,
            job_id=stands.job_id,
            job_nodes=stands.job.nodes if stands.job is not None and stands.job.nodes else None,
            starts_at=stands.starts_at,
            ends_at=self._ends_at(stands, attempt),
            step=step,
            steps_total=self._steps_total or (status.steps_total if status else None),
            loss=self._curve.last,
            losses=tuple(self._curve.losses),
            speed=self._speed(attempt),
            step_seconds=seconds,
            eta_seconds=self._left(step, seconds, status),
            goodput=self._meter.goodput(until=now, running=running),
            saved_step=saved[0] if saved else None,
            saved_at=saved[1] if saved else None,
            attempts=tuple(decided),
            health=read_health(self.run) if stands.state in ("running", "lost", "starting") else None,
            last_error=status.last_error if status else None,
            events=tuple(self._events),
        )

    def _take_in_events(self, events: list[dict[str, Any]]) -> None:
        self._meter.add_events(events)
        for event in events:
            total = event.get("steps_total")
            self._steps_total = total if isinstance(total, int) else self._steps_total
            if event.get("event") not in _DULL_EVENTS:
                self._events.append(event)

    def _take_in_metrics(self, rows: list[dict[str, Any]]) -> None:
        self._meter.add_metrics(rows)
        for row in rows:
            self._curve.add(row)
            if isinstance(row.get("step"), int) and row.get("step_seconds") is not None:
                if self._rows and self._rows[-1].get("attempt") != row.get("attempt"):
                    self._rows.clear()  # on other nodes, perhaps with another plan
                self._rows.append(row)

    def _standing(self, status: Status | None, *, settled: bool) -> Standing:
        if not submissions(self.run):
            return _local_standing(status)
        if status is not None and status.state == "finished" and settled:
            return Standing("finished", submissions(self.run)[-1].job_id)
        return standing(self.run, status, queue())

    def _usual(self, name: str) -> float | None:
        values = [row[name] for row in self._rows if isinstance(row.get(name), (int, float))]
        return statistics.median(values) if values else None

    def _speed(self, attempt: int) -> Speed | None:
        for unit, name in (("tok", "tokens_per_second"), ("samples", "samples_per_second")):
            found = self._usual(name)
            if found:
                predicted = self._prediction(attempt).get(name)
                return Speed(unit, found, predicted if isinstance(predicted, (int, float)) and predicted > 0 else None)
        return None

    def _prediction(self, attempt: int) -> dict[str, Any]:
        if self._predicted[0] != attempt:
            self._predicted = (attempt, _document(self.run.attempt_path(attempt) / PREDICTION_FILE))
        return self._predicted[1]

    def _left(self, step: int, seconds: float | None, status: Status | None) -> float | None:
        total = self._steps_total or (status.steps_total if status else None)
        return (total - step) * seconds if total is not None and seconds is not None and step < total else None

    def _newest_checkpoint(self) -> tuple[int, datetime | None] | None:
        found = committed_steps(self.run.checkpoints)
        if not found:
            return None
        step = max(found)
        try:
            written = (self.run.checkpoints / found[step] / COMMITTED).stat().st_mtime
        except OSError:  # pruned just now
            return step, None
        return step, datetime.fromtimestamp(written, timezone.utc)

    def _ends_at(self, stands: Standing, attempt: int) -> datetime | None:
        if stands.job is not None and stands.job.ends_at is not None and not stands.job.waits:
            return stands.job.ends_at
        place = read_place(self.run, attempt)
        return datetime.fromtimestamp(place.deadline, timezone.utc) if place and place.deadline else None


def _local_standing(status: Status | None) -> Standing:
    state = local_state(status)
    if status is None or state != "lost" or status.host != socket.gethostname() or writer_is_gone(status):
        return Standing(state)
    # Its process is there: on a busy machine, starting alone may take longer than a minute.
    silent = datetime.now(timezone.utc) - status.updated_at
    return Standing("running", note=f"no sign of life for {duration_text(silent.total_seconds())}")


def is_over(stands: Standing, decided: list[Settled], attempt: int) -> bool:
    """Whether nothing more comes by itself. A failed attempt may be followed by another one in the same job."""
    last = decided[-1] if decided and decided[-1].ended.attempt == attempt else None
    if stands.state == "finished":  # rank 0 says so; the job may still find that another rank failed after it
        return last is not None or not stands.in_queue
    if last is not None and last.verdict.decision == "hold":
        return stands.state in (*_IS_OVER, "queued")  # it waits for a person
    if stands.state not in _IS_OVER or stands.in_queue:
        return False
    if last is not None and stands.job is None and stands.state != "lost":
        return last.verdict.decision not in GOES_ON  # Slurm does not answer: then the ledger says what follows
    return True


def _may_come_back(stands: Standing, status: Status | None, now: datetime) -> bool:
    """Of a lost run: whether only its sign of life is late, from a machine that cannot be asked."""
    if stands.state != "lost" or stands.job_id is not None or status is None or writer_is_gone(status):
        return False
    return now - status.updated_at < 2 * LOST_AFTER


def exit_code_of(run: RunDirectory, state: str, decided: list[Settled], attempt: int) -> int:
    """As the run's own: of the verdict where there is one, else as its launcher left."""
    if state == "finished":
        return EXIT_FINISHED
    if decided and decided[-1].ended.attempt == attempt and decided[-1].verdict.decision not in GOES_ON:
        return decided[-1].verdict.exit_code
    if state == "stopped":
        return EXIT_STOPPED
    told = Result.load(run.path).exit_code
    return told if told and state == "failed" else EXIT_FAILED


def _note(stands: Standing) -> str | None:
    return stands.reason.text if stands.reason is not None else stands.note


def _document(path: Path) -> dict[str, Any]:
    """A JSON object; nothing where it is not there yet, or not whole."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
