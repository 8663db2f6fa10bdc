"""Exporters: where a run's metrics can be sent to, by name. The files of the run stay the truth."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from gradus.record.directory import RunDirectory
from gradus.record.polling import Polling
from gradus.record.problem import OnProblem, report_on_stderr
from gradus.record.tensorboard import TensorBoardExporter, check_tensorboard_installed, export_tensorboard
from gradus.record.tracking import TrackingExporter, export_once
from gradus.schema.errors import InputError, unknown_name

SERVICES = {"mlflow": "mlflow", "wandb": "wandb"}  # name → what is imported
NAMES = ("tensorboard", *SERVICES)
_EVERY_SECONDS = 2.0


class Exporter(Protocol):
    """Follows a run: `poll` sends what is new."""

    def poll(self) -> None: ...

    def close(self) -> None: ...


def check_exporters(names: Iterable[str]) -> None:
    """Refuse what is unknown, or needs a package that is not installed."""
    for name in names:
        if name not in NAMES:
            raise unknown_name("exporter", name, NAMES, field="--export")
        if name == "tensorboard":
            check_tensorboard_installed()
        elif importlib.util.find_spec(SERVICES[name]) is None:
            raise InputError(
                f"export to {name} needs the {SERVICES[name]} package",
                hint=f'pip install "gradus[{name}]"',
                field="exporters",
                found=name,
            )


def exporter_of(
    run: RunDirectory, name: str, to: str | None = None, on_problem: OnProblem = report_on_stderr
) -> TensorBoardExporter | TrackingExporter:
    check_exporters([name])
    if name == "tensorboard":
        return TensorBoardExporter(run, Path(to) if to else None, on_problem)
    return _tracking(run, name, to, on_problem)


def export(run: RunDirectory, name: str, to: str | None = None) -> tuple[str, int | None]:
    """Send all that a run has so far: where it is now, and how many steps were new there, where that is known."""
    check_exporters([name])
    if name == "tensorboard":
        return str(export_tensorboard(run, Path(to) if to else None)), None
    exporter = _tracking(run, name, to, report_on_stderr)
    sent = export_once(exporter)
    return exporter.place, sent


def _tracking(run: RunDirectory, name: str, to: str | None, on_problem: OnProblem) -> TrackingExporter:
    if name == "mlflow":
        from gradus.record import mlflow

        return TrackingExporter(run, name, to or mlflow.default_target(run), mlflow.MlflowTracker, on_problem)
    from gradus.record import wandb

    return TrackingExporter(run, name, to or wandb.default_target(run), wandb.WandbTracker, on_problem)


class LiveExporters:
    """Those that a recipe asks for, while it trains. From a thread: a service far away must not hold up a launcher."""

    def __init__(self, run: RunDirectory, names: Iterable[str], on_problem: OnProblem = report_on_stderr) -> None:
        self._exporters: list[Exporter] = []
        for name in names:
            try:
                self._exporters.append(exporter_of(run, name, on_problem=on_problem))
            except InputError as error:  # checked before the launch; whatever has changed since, training goes on
                on_problem(error.message)
        self._polling = Polling(self._poll, _EVERY_SECONDS) if self._exporters else None

    def _poll(self) -> None:
        for exporter in self._exporters:
            exporter.poll()

    def close(self) -> None:
        if self._polling:
            self._polling.close()
        self._poll()
        for exporter in self._exporters:
            exporter.close()
