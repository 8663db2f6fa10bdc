"""MLflow: a run of gradus as a run of MLflow, of an experiment with the run's name."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus.record.directory import RunDirectory
from gradus.record.run_settings import run_settings
from gradus.record.tracking import Row

# What a server takes in one request.
_METRICS_AT_ONCE = 1000
_PARAMETERS_AT_ONCE = 100
_LONGEST_PARAMETER = 500
_NOT_IN_A_NAME = re.compile(r"[^\w./ -]")
_STATES = {"finished": "FINISHED", "failed": "FAILED", "lost": "KILLED", "stopped": "SCHEDULED"}
# A run must not wait minutes for a server that is away, and the library must not tell its makers of it.
_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def default_target(run: RunDirectory) -> str:
    """Where MLflow was told to keep runs; else a folder beside all runs."""
    return os.environ.get("MLFLOW_TRACKING_URI") or (run.path.parents[1] / "mlruns").as_uri()


class MlflowTracker:
    """A run of MLflow. Its numbers can only be added to: steps made again are there twice, the newer ones later."""

    def __init__(self, run: RunDirectory, target: str, known_id: str | None) -> None:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        uri = _uri(target)
        if uri.startswith("file:"):
            # Newer versions would rather have a database; whoever names a folder means a folder.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        self.id = known_id or self._found(run) or self._created(run)
        self.place = f"{target} (experiment {run.name}, run {self.id})"
        if known_id is not None:
            self._client.update_run(self.id, status="RUNNING")

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_NOT_IN_A_NAME.sub("_", name), float(value), round(row.time * 1000), row.step)
            for row in rows
            for name, value in row.numbers.items()
        ]
        for part in _parts(metrics, _METRICS_AT_ONCE):
            self._client.log_batch(self.id, metrics=part)

    def discard(self, attempt: int, first: int, last: int) -> None:
        words = f"steps {first} to {last} of attempt {attempt} were made again"
        self._client.set_tag(self.id, f"gradus.discarded.{attempt}.{first}", words)

    def close(self, state: str) -> None:
        self._client.set_tag(self.id, "gradus.state", state)
        if state in ("finished", "failed", "lost"):
            self._client.set_terminated(self.id, _STATES[state])
        elif state in _STATES:
            self._client.update_run(self.id, status=_STATES[state])

    def _found(self, run: RunDirectory) -> str | None:
        """One that an earlier export made, of which the note is lost."""
        experiment = self._client.get_experiment_by_name(run.name)
        if experiment is None:
            return None
        wanted = f"tags.`gradus.run` = '{run.name}/{run.id}' and tags.`gradus.path` = '{_quoted(run.path)}'"
        found = self._client.search_runs([experiment.experiment_id], filter_string=wanted, max_results=1)
        return str(found[0].info.run_id) if found else None

    def _created(self, run: RunDirectory) -> str:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(run.name)
        try:
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.name)
        except MlflowException:  # another run of that name was a moment faster
            experiment_id = self._client.get_experiment_by_name(run.name).experiment_id
        tags = {"gradus.run": f"{run.name}/{run.id}", "gradus.path": str(run.path)}
        begun = round(_begun(run) * 1000)
        made = self._client.create_run(experiment_id, start_time=begun, tags=tags, run_name=f"{run.name}/{run.id}")
        settings = [
            Param(_NOT_IN_A_NAME.sub("_", name), str(value)[:_LONGEST_PARAMETER])
            for name, value in run_settings(run).items()
        ]
        for part in _parts(settings, _PARAMETERS_AT_ONCE):
            self._client.log_batch(made.info.run_id, params=part)
        return str(made.info.run_id)


def _uri(target: str) -> str:
    return target if re.match(r"[a-z][a-z0-9+.-]*:", target) else Path(target).absolute().as_uri()


def _quoted(path: Path) -> str:
    return str(path).replace("'", "")


def _begun(run: RunDirectory) -> float:
    try:
        return run.attempt_path(1).stat().st_mtime
    except OSError:
        return time.time()


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
