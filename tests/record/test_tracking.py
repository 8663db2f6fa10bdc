"""Sending metrics to a service: each line once, across processes and attempts, and never in the way of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from watched_runs import begin, say, train

from gradus.record.append_log import AppendLog
from gradus.record.directory import RunDirectory
from gradus.record.exporters import NAMES, LiveExporters, check_exporters
from gradus.record.timings import TimingLog
from gradus.record.tracking import Row, TrackingExporter, export_once
from gradus.schema.breakdown import Breakdown
from gradus.schema.errors import GradusError, InputError
from gradus.schema.recipe import Recipe


@dataclass
class Service:
    """What a service was told. It may be away for a while."""

    rows: list[tuple[int, float | None]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    opened: list[str | None] = field(default_factory=list)
    discarded: list[tuple[int, int, int]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    away: bool = False

    def open(self, run: RunDirectory, target: str, known_id: str | None) -> _Run:
        if self.away:
            raise ConnectionError("nobody answers\nand more")
        self.opened.append(known_id)
        return _Run(self)


class _Run:
    id = "the-run"
    place = "somewhere"

    def __init__(self, service: Service) -> None:
        self._service = service

    def log(self, rows: Sequence[Row]) -> None:
        if self._service.away:
            raise ConnectionError("nobody answers")
        self._service.rows += [(row.step, row.numbers.get("train/loss")) for row in rows]
        self._service.times += [row.time for row in rows]

    def discard(self, attempt: int, first: int, last: int) -> None:
        self._service.discarded.append((attempt, first, last))

    def close(self, state: str) -> None:
        self._service.states.append(state)


@pytest.fixture
def service() -> Service:
    return Service()


def exporter(run: RunDirectory, service: Service, problems: Any = None) -> TrackingExporter:
    return TrackingExporter(run, "test", "there", service.open, problems or pytest.fail)


def log(run: RunDirectory, *records: dict[str, Any]) -> None:
    writer = AppendLog(run.metrics_path)
    for record in records:
        writer.write(record)
    writer.close()


def test_each_step_is_sent_once_by_whoever_comes_next(run, service):
    log(run, {"step": 1, "attempt": 1, "loss": 3.0}, {"step": 2, "attempt": 1, "loss": 2.0})
    first = exporter(run, service)
    first.poll()
    first.poll()
    log(run, {"step": 3, "attempt": 1, "loss": 1.0})
    first.poll()
    first.close()
    log(run, {"step": 4, "attempt": 1, "loss": 0.5})
    assert export_once(exporter(run, service)) == 1
    assert export_once(exporter(run, service)) == 0
    assert service.rows == [(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.5)]
    assert service.opened == [None, "the-run"]
    assert service.discarded == []


def test_what_another_place_has_is_its_own_business(run, service):
    log(run, {"step": 1, "attempt": 1, "loss": 3.0})
    export_once(exporter(run, service))
    elsewhere = Service()
    assert export_once(TrackingExporter(run, "test", "elsewhere", elsewhere.open, pytest.fail)) == 1
    assert elsewhere.opened == [None]
    assert export_once(exporter(run, service)) == 0


def test_a_line_that_is_not_finished_comes_later_and_a_broken_one_never(run, service):
    run.metrics_path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo\n{"step": 3, "loss"')
    following = exporter(run, service)
    following.poll()
    with run.metrics_path.open("a") as file:
        file.write(": 1.0}\n")
    following.poll()
    assert service.rows == [(1, 3.0), (3, 1.0)]


def test_a_later_attempt_discards_the_steps_it_makes_again(run, service):
    following = exporter(run, service)
    log(run, *({"step": step, "attempt": 1, "loss": 1.0} for step in (1, 2, 3, 4)))
    following.poll()
    log(run, *({"step": step, "attempt": 2, "loss": 2.0} for step in (3, 4, 5)))
    following.poll()
    assert service.discarded == [(1, 3, 4)]
    assert service.rows[4:] == [(3, 2.0), (4, 2.0), (5, 2.0)]


def test_a_rollback_discards_the_steps_after_it(run, service):
    following = exporter(run, service)
    log(run, *({"step": step, "attempt": 1, "loss": 1.0} for step in (1, 2, 3, 4)))
    following.poll()
    log(run, {"rolled_back_to": 2, "attempt": 1}, {"step": 3, "attempt": 1, "loss": 2.0})
    following.poll()
    assert service.discarded == [(1, 3, 4)]
    assert service.rows[4:] == [(3, 2.0)]


def test_an_export_made_afterwards_has_only_what_the_run_kept(run, service):
    log(run, *({"step": step, "attempt": 1, "loss": 1.0} for step in (1, 2, 3, 4)))
    log(run, *({"step": step, "attempt": 2, "loss": 2.0} for step in (3, 4)))
    log(run, {"rolled_back_to": 3, "attempt": 2}, {"step": 4, "attempt": 2, "loss": 3.0})
    export_once(exporter(run, service))
    assert service.rows == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert service.discarded == []


def test_a_service_that_is_away_is_told_of_once_and_gets_everything_later(run, service):
    problems: list[str] = []
    following = exporter(run, service, problems.append)
    log(run, {"step": 1, "attempt": 1, "loss": 3.0})
    service.away = True
    following.poll()
    following.poll()
    log(run, {"step": 2, "attempt": 1, "loss": 2.0})
    service.away = False
    following.poll()
    service.away = True
    log(run, {"step": 3, "attempt": 1, "loss": 1.0})
    following.poll()
    following.release()
    service.away = False
    export_once(exporter(run, service))
    assert service.rows == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert [one.partition(":")[2] for one in problems] == [
        " ConnectionError: nobody answers; what is not sent is tried again",
        " works again",
        " ConnectionError: nobody answers; what is not sent is tried again",
    ]


def test_who_waits_for_an_export_is_told_that_it_failed(run, service):
    log(run, {"step": 1, "attempt": 1, "loss": 3.0})
    service.away = True
    with pytest.raises(GradusError, match="cannot export to there: ConnectionError: nobody answers"):
        export_once(exporter(run, service))
    service.away = False
    assert export_once(exporter(run, service)) == 1  # and holds nothing up


def test_two_at_once_are_one_too_many(run, service):
    first = exporter(run, service)
    with pytest.raises(InputError, match="another process exports this run to test"):
        exporter(run, service)
    first.close()
    exporter(run, service).close()


def test_the_service_hears_how_the_run_stands_also_when_nothing_is_new(run, service):
    train(run, begin(run), 1, 3)
    then = exporter(run, service)
    then.poll()
    then.close()
    say(run, "finished", 3)
    export_once(exporter(run, service))
    export_once(exporter(run, service))
    assert service.states == ["running", "finished"]


def test_steps_have_the_time_at_which_they_were_logged(run, service):
    log(run, *({"step": step, "attempt": 1, "loss": 1.0} for step in (1, 2)))
    kind = {"attempt": 1, "rank": 0, "node": "n", "steps": 1, "measured_steps": 1, "step_seconds": 1.0, "seconds": {}}
    TimingLog(run, 0).write(Breakdown(time=1234.5, step=1, **kind))
    export_once(exporter(run, service))
    assert service.times == [1234.5, run.metrics_path.stat().st_mtime]


def test_recipes_and_commands_know_the_same_exporters():
    assert str(Recipe.model_fields["exporters"].annotation).count("'") // 2 == len(NAMES)
    assert all(repr(name) in str(Recipe.model_fields["exporters"].annotation) for name in NAMES)
    with pytest.raises(InputError, match="did you mean 'mlflow'"):
        check_exporters(["mlfow"])


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_without_the_package_the_hint_says_how_to_get_it(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError) as refusal:
        check_exporters([name])
    assert f"gradus[{name}]" in (refusal.value.hint or "")


def test_a_live_export_that_is_held_by_another_does_not_stop_the_launch(run, monkeypatch):
    held = TrackingExporter(run, "mlflow", "there", Service().open)
    monkeypatch.setattr("gradus.record.exporters.check_exporters", lambda names: None)
    problems: list[str] = []
    LiveExporters(run, ["mlflow"], problems.append).close()
    held.release()
    assert "another process exports this run to mlflow" in problems[0]
