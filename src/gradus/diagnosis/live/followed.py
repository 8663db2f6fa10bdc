"""Followed: runs as they are now, looked at no more often than somebody asks, and kept no longer than they matter."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.explain import explain
from gradus.diagnosis.finding import Finding
from gradus.launcher.story import local_state
from gradus.launcher.watching import View, Watching
from gradus.record import device_log, timings
from gradus.record.directory import RunDirectory, find_runs
from gradus.record.metrics import is_evaluation
from gradus.record.newest import NewestOfEach, newest_records
from gradus.record.problem import OnProblem, report_on_stderr
from gradus.record.status import read_status, shown_state
from gradus.schema.breakdown import Breakdown
from gradus.schema.device_sample import DeviceSample

# Browsers and Prometheus may ask at once: one look serves them all.
_LOOK_SECONDS = 1.0
_LIST_SECONDS = 5.0
# Judging a run reads all that it has written, which takes longer than looking at its end.
_JUDGE_SECONDS = 30.0
_JUDGE_PATIENCE = 20.0  # times as long as it took
# With more than this it is done in the background, so that Prometheus does not give up on an answer.
_QUICK_BYTES = 16 * 2**20
# How long after its last sign of life a run is still told of. One that failed is to be seen the next morning.
KEPT_SECONDS = {"finished": 3600.0, "stopped": 3600.0, "failed": 86400.0, "lost": 86400.0}


@dataclass(frozen=True)
class Snapshot:
    """A run at a moment. None, or nothing, is what nobody has written."""

    view: View
    row: Mapping[str, Any]
    """The newest number under each name that training and evaluation log."""
    timings: tuple[Breakdown, ...]
    """The newest of each rank."""
    devices: tuple[DeviceSample, ...]
    """The newest of each node."""
    progressed_at: float | None
    """Unix time at which it last wrote down a step, or began its attempt."""
    updated_at: float | None
    """Unix time of its last sign of life."""
    findings: tuple[Finding, ...] | None
    """None where it was not judged."""

    @property
    def name(self) -> str:
        return f"{self.view.run.name}/{self.view.run.id}"


@dataclass
class Followed:
    """One run. What was read of it once is not read again."""

    run: RunDirectory
    on_problem: OnProblem = report_on_stderr
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _watching: Watching | None = None
    _seen: tuple[float, Snapshot, Any] | None = None
    _found: tuple[Finding, ...] | None = None
    _judging: bool = False
    _judged_of: Any = None  # the fingerprint then
    _judge_at: float = 0.0  # not before

    def __post_init__(self) -> None:
        self._timings = NewestOfEach(self.run.path / timings.FOLDER)
        self._devices = NewestOfEach(self.run.path / device_log.FOLDER)

    def snapshot(self) -> Snapshot:
        """How it is now, or was a moment ago."""
        with self._lock:
            if self._seen is not None:
                at, snapshot, files = self._seen
                if time.monotonic() - at < _LOOK_SECONDS or (snapshot.view.over and files == self.fingerprint()):
                    return snapshot
            files = self.fingerprint()
            snapshot = self._look()
            self._seen = (time.monotonic(), snapshot, files)
            if snapshot.view.over:
                self._watching = None  # with all it had read; should the run go on, it is read again
            return snapshot

    def fingerprint(self) -> tuple[object, ...]:
        """Other than before if the run wrote something, or has been silent for so long that it is lost."""
        paths = (self.run.status_path, self.run.metrics_path, self.run.events, self.run.path / "attempts")
        return (local_state(read_status(self.run)), *(_written(path) for path in paths))

    def _look(self) -> Snapshot:
        self._watching = self._watching or Watching(self.run)
        view = self._watching.look()
        status = read_status(self.run)
        return Snapshot(
            view=view,
            row=_newest_numbers(self.run),
            timings=tuple(one for one in _read(Breakdown, self._timings.poll()) if one.attempt == view.attempt),
            devices=tuple(one for one in _read(DeviceSample, self._devices.poll()) if one.attempt == view.attempt),
            progressed_at=_progressed_at(self.run, view.attempt),
            updated_at=status.updated_at.timestamp() if status else None,
            findings=self._findings(view),
        )

    def _findings(self, view: View) -> tuple[Finding, ...] | None:
        files = self.fingerprint()
        now = time.monotonic()
        due = self._judged_of is None or (files != self._judged_of and (view.over or now >= self._judge_at))
        if due and not self._judging:
            self._judging, self._judged_of = True, files
            if _bytes_written(self.run) <= _QUICK_BYTES:
                self._judge()
            else:  # whoever asks gets what was found before
                threading.Thread(target=self._judge, name="gradus-judge", daemon=True).start()
        return self._found

    def _judge(self) -> None:
        begun = time.monotonic()
        try:
            # Without traces: a big one takes a minute to look through.
            self._found = explain(Evidence(self.run, is_watched=True)).findings
        except Exception as error:  # a run that cannot be judged can still be watched
            self.on_problem(f"{self.run.path}: not judged: {type(error).__name__}: {error}")
            self._found = None
        ended = time.monotonic()
        self._judge_at = ended + max(_JUDGE_SECONDS, _JUDGE_PATIENCE * (ended - begun))
        self._judging = False


class Folder:
    """All runs of a folder, or a single one."""

    def __init__(self, root: Path, only: RunDirectory | None = None, on_problem: OnProblem = report_on_stderr) -> None:
        self.root = root
        self.only = only
        self._on_problem = on_problem
        self._lock = threading.Lock()
        self._followed: dict[Path, Followed] = {}
        self._listed: tuple[float, list[RunDirectory]] = (-math.inf, [])

    def runs(self) -> list[RunDirectory]:
        """The one started last comes first."""
        if self.only is not None:
            return [self.only]
        with self._lock:
            at, runs = self._listed
            if time.monotonic() - at >= _LIST_SECONDS:
                runs = find_runs(self.root)
                self._listed = (time.monotonic(), runs)
                there = {run.path for run in runs}
                self._followed = {path: one for path, one in self._followed.items() if path in there}
            return runs

    def find(self, name: str, run_id: str) -> RunDirectory | None:
        """Only what is listed can be found: no text from outside ever becomes a path."""
        return next((run for run in self.runs() if run.name == name and run.id == run_id), None)

    def followed(self, run: RunDirectory) -> Followed:
        with self._lock:
            return self._followed.setdefault(run.path, Followed(run, self._on_problem))

    def snapshots(self, runs: list[RunDirectory] | None = None) -> list[Snapshot]:
        """Of these runs, or of all; one that is deleted meanwhile is left out."""
        found = []
        for run in self.runs() if runs is None else runs:
            try:
                found.append(self.followed(run).snapshot())
            except FileNotFoundError:
                continue
        return found

    def that_matter(self) -> list[RunDirectory]:
        """Those that go on or wait, and those that ended not long ago. Of the others nothing but the status is read."""
        now = time.time()
        return [run for run in self.runs() if _matters(run, now)]


def _matters(run: RunDirectory, now: float) -> bool:
    status = read_status(run)
    if status is None:
        return run.job.is_dir()
    kept = KEPT_SECONDS.get(shown_state(status))
    return kept is None or now - status.updated_at.timestamp() < kept


def _newest_numbers(run: RunDirectory) -> dict[str, Any]:
    """Of the newest attempt. Training has the last word about what both it and evaluation log."""
    records = [record for record in newest_records(run.metrics_path) if "step" in record]
    newest = records[-1].get("attempt") if records else None
    ours = [record for record in records if record.get("attempt") == newest]
    ours.sort(key=lambda record: not is_evaluation(record))  # stable: each kind stays in the order of the file
    return {key: value for record in ours for key, value in record.items() if value is not None}


def _progressed_at(run: RunDirectory, attempt: int) -> float | None:
    times = []
    for path in (run.metrics_path, run.attempt_path(attempt)):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _bytes_written(run: RunDirectory) -> int:
    """Of what is read to judge a run."""
    files = [run.metrics_path]
    for folder in (timings.FOLDER, device_log.FOLDER):
        files += (run.path / folder).glob("*.jsonl")
    return sum(_written(path)[0] for path in files)


def _written(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return (stat.st_size, stat.st_mtime_ns)


def _read(kind: type[BaseModel], records: list[dict[str, Any]]) -> list[Any]:
    """Those records that are of this kind."""
    found = []
    for record in records:
        try:
            found.append(kind.model_validate(record))
        except ValidationError:
            continue
    return found
