"""MLflow, the real one: one run across attempts and processes, with the numbers that the files have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from watched_runs import begin, say, train

from gradus.record.append_log import AppendLog
from gradus.record.directory import RunDirectory
from gradus.record.exporters import export, exporter_of
from gradus.record.tracking import _path


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return (tmp_path / "mlruns").as_uri()


@pytest.fixture
def trained(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "runs", "gpt", "r1")
    attempt = begin(run)
    (run.attempt_path(attempt) / "recipe.yaml").write_text("batch: 32\noptimizer: {use: adamw, lr: 0.003}\n")
    train(run, attempt, 1, 30)
    return run


def runs_in(store: str, name: str = "gpt") -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    return list(client.search_runs([client.get_experiment_by_name(name).experiment_id]))


def history(store: str, run_id: str, metric: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    found = MlflowClient(tracking_uri=store).get_metric_history(run_id, metric)
    return [(one.step, one.value) for one in found]


def test_mlflow_has_the_numbers_of_the_files(trained, store):
    log = AppendLog(trained.metrics_path)
    log.write({"step": 30, "attempt": 1, "validation_loss": 2.5})
    log.write({"step": 31, "attempt": 1, "loss": math.nan})
    place, sent = export(trained, "mlflow", store)
    [found] = runs_in(store)
    assert sent == 31
    assert found.info.run_id in place
    losses = history(store, found.info.run_id, "train/loss")
    assert losses[:30] == [(step, 5.0 - step / 50) for step in range(1, 31)]
    assert math.isnan(losses[30][1])
    assert history(store, found.info.run_id, "validation/loss") == [(30, 2.5)]
    assert found.data.params["recipe.optimizer.lr"] == "0.003"
    assert found.data.tags["gradus.run"] == "gpt/r1"


def test_it_is_one_run_across_attempts_processes_and_a_lost_note(trained, store):
    live = exporter_of(trained, "mlflow", store)
    live.poll()
    live.close()
    say(trained, "stopped", 30)
    train(trained, begin(trained, step=20), 21, 40, seconds=0.25)
    say(trained, "finished", 40, attempt=2)
    live = exporter_of(trained, "mlflow", store)
    live.poll()
    live.close()
    [found] = runs_in(store)
    losses = history(store, found.info.run_id, "train/loss")
    assert [step for step, _ in losses] == [*range(1, 31), *range(21, 41)]
    assert found.info.status == "FINISHED"
    assert found.data.tags["gradus.discarded.1.21"] == "steps 21 to 30 of attempt 1 were made again"
    _path(trained, "mlflow").unlink()
    export(trained, "mlflow", store)
    assert [one.info.run_id for one in runs_in(store)] == [found.info.run_id]


def test_a_plain_folder_will_do_and_without_one_it_lies_beside_the_runs(trained, store, tmp_path):
    export(trained, "mlflow", str(tmp_path / "here"))
    assert len(runs_in((tmp_path / "here").as_uri())) == 1
    export(trained, "mlflow")
    assert len(runs_in((tmp_path / "runs" / "mlruns").as_uri())) == 1
