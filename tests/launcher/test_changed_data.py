"""A run goes on with the data it began with, wherever that lies now; with other data only if that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradus.cli.train import TrainOptions, train_command
from gradus.launcher.attempt import Launch
from gradus.launcher.recipe_run import prepare
from gradus.record.lock import release
from gradus.record.status import Status, write_status
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe

CPU = Cluster(name="test", cpu_cores=1, memory_gib=8.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))


def recipe(folder: Path, **changes: Any) -> Recipe:
    folder.mkdir(exist_ok=True)
    (folder / "web.txt").write_text("of cats and dogs " * 100)
    data = {"use": "text", "path": str(folder / "web.txt"), **changes.pop("data", {})}
    model = {"use": "gpt", "layers": 1, "width": 8, "heads": 1, "context": 16}
    optimizer = {"use": "adamw", "lr": 1e-3}
    document = {"name": "x", "model": model, "data": data, "batch": 4, "steps": 2, "optimizer": optimizer, **changes}
    return Recipe.from_document(document)


def launched(recipe: Recipe, runs: Path, **options: Any) -> Launch:
    launch = prepare(recipe, 1, cluster=CPU, runs=runs, **options)
    assert launch.lock is not None
    release(launch.lock)
    write_status(launch.run, Status("stopped"))
    return launch


def test_data_that_moved_is_the_same(tmp_path: Path) -> None:
    first = launched(recipe(tmp_path / "old"), tmp_path / "runs")
    moved = recipe(tmp_path / "new", data={"stage": "auto"})
    again = launched(moved, tmp_path / "runs", resume=str(first.run.path))
    assert again.attempt == 2
    assert not again.run.changed_data_mark(2).exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 2}, "seed: the run began with 1, found 2"),
        ({"data": {"shuffle": "none"}}, r"data\.shuffle: the run began with the default, found 'none'"),
        ({"data": {"context": 8}}, r"data\.context: the run began with 16, found 8"),
    ],
)
def test_other_data_is_refused_at_once_and_accepted_on_request(tmp_path: Path, changes: Any, said: str) -> None:
    first = launched(recipe(tmp_path / "data"), tmp_path / "runs")
    other = recipe(tmp_path / "data", **changes)
    with pytest.raises(InputError, match=said) as refused:
        launched(other, tmp_path / "runs", resume=str(first.run.path))
    assert "--accept-changed-data" in str(refused.value.hint)
    assert first.run.attempts == [1]
    again = launched(other, tmp_path / "runs", resume=str(first.run.path), accept_changed_data=True)
    assert again.run.changed_data_mark(2).exists()


def test_another_model_is_another_run_and_the_keys_that_differ_are_named(tmp_path: Path) -> None:
    first = launched(recipe(tmp_path / "data"), tmp_path / "runs")
    model = {"use": "gpt", "layers": 1, "width": 16, "heads": 1, "context": 16, "dropout": 0.1}
    with pytest.raises(InputError) as refused:
        launched(recipe(tmp_path / "data", model=model), tmp_path / "runs", resume=str(first.run.path))
    told = refused.value.message.removeprefix("recipe: ")
    assert (
        told == "model.width: the run began with 8, found 16; model.dropout: the run began with the default, found 0.1"
    )
    assert (refused.value.details["field"], refused.value.details["found"]) == ("model.width", 16)


def test_to_accept_changed_data_needs_a_run_to_go_on_with() -> None:
    with pytest.raises(InputError, match="without --resume"):
        train_command(TrainOptions(recipe="recipe.yaml", accept_changed_data=True))
