"""TensorBoard event files made from a run's metrics. The metrics stay the truth; these can always be made again."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gradus.record.append_log import LogTail, read_lines
from gradus.record.directory import RunDirectory
from gradus.record.problem import OnProblem, report_on_stderr
from gradus.record.scalars import scalars
from gradus.schema.errors import InputError

# One fixed name, so that a second export replaces the first instead of doubling every point.
_FILE_NAME = "events.out.tfevents.0.gradus"


def export_tensorboard(run: RunDirectory, target: Path | None = None) -> Path:
    """Write all metrics so far; returns the folder to point TensorBoard at. Doing it twice changes nothing."""
    try:
        records = read_lines(run.metrics_path).records
    except OSError as error:
        raise InputError(f"cannot read {run.metrics_path}: {error.strerror}") from error
    exporter = TensorBoardExporter(run, target)
    try:
        exporter.write(records)
    except OSError as error:
        raise InputError(f"cannot write {exporter.target}: {error.strerror}") from error
    finally:
        exporter.close()
    return exporter.target


def check_tensorboard_installed() -> None:
    """Refuse what needs TensorBoard where it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError(
            "TensorBoard export needs the tensorboard package",
            hint='pip install "gradus[tensorboard]"',
            field="exporters",
            found="tensorboard",
        )


class TensorBoardExporter:
    """Follows a live run. Each `poll` adds the new points; one that cannot be written ends the export, not the run."""

    def __init__(self, run: RunDirectory, target: Path | None = None, on_problem: OnProblem = report_on_stderr) -> None:
        check_tensorboard_installed()
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.target = target or run.path / "tensorboard"
        self._metrics_path = run.metrics_path
        self._tail = LogTail(run.metrics_path)
        self._on_problem = on_problem
        self._attempt: int | None = None
        try:
            self.target.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = (self.target / _FILE_NAME).open("wb")
        except OSError as error:
            raise InputError(f"cannot write {self.target}: {error.strerror}") from error
        self._writer = RecordWriter(self._file)
        self._add(0.0, file_version="brain.Event:2")

    def poll(self) -> None:
        if self._file.closed:
            return
        try:
            self.write(self._tail.poll())
        except OSError as error:
            self._on_problem(f"{self.target}: TensorBoard export ends here ({error.strerror}); the metrics go on")
            self.close()

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add these points; a file that cannot be written is the caller's problem."""
        for record in records:
            if "rolled_back_to" in record:
                self._forget_from(record["rolled_back_to"] + 1)
            if "step" in record:
                self._add_record(record)
        self._file.flush()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._on_problem(f"{self.target}: {error.strerror}")

    def _add_record(self, record: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        step, attempt = record["step"], record.get("attempt", 0)
        # The lines carry no time of their own; when the file grew is as near as it gets, and the same in every export.
        wall_time = self._metrics_path.stat().st_mtime
        if self._attempt is not None and attempt > self._attempt:
            self._forget_from(step)
        self._attempt = attempt
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record).items()]
        self._add(wall_time, step=step, summary=Summary(value=values))

    def _forget_from(self, step: int) -> None:
        """TensorBoard then forgets the points from this step on: those of an earlier attempt, or before a rollback."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        wall_time = self._metrics_path.stat().st_mtime
        self._add(wall_time, step=step, session_log=SessionLog(status=SessionLog.START))

    def _add(self, wall_time: float, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=wall_time, **content).SerializeToString())
