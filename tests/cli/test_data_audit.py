"""`gradus data audit`: what it says, and with which exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sampled_runs import BATCH, SampledRun
from typer.testing import CliRunner

from gradus.cli.data import app
from gradus.data.order import Order
from gradus.data.orders import order_for
from gradus.data.position import specification_of
from gradus.schema.recipe import Recipe
from gradus.training.building import open_data


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))


def audited(run: SampledRun, *options: str) -> tuple[int, str]:
    for step in run.committed:
        folder = run.run.checkpoints / f"step-{step:08}"
        folder.mkdir(exist_ok=True)
        (folder / "COMMITTED").touch()
    done = CliRunner().invoke(app, ["audit", str(run.run.path), *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


class Mixture(NamedTuple):
    recipe: Recipe
    specification: dict[str, Any]
    order: Order


@pytest.fixture
def mixture(tmp_path: Path) -> Mixture:
    for name, letters in (("code", 700), ("web", 1900)):
        (tmp_path / f"{name}.txt").write_text("".join(chr(97 + i * i % 26) for i in range(letters)))
    sources = {
        "code": {"use": "text", "path": str(tmp_path / "code.txt"), "weight": 1},
        "web": {"use": "text", "path": str(tmp_path / "web.txt"), "weight": 3},
    }
    document = {"name": "mixed", "batch": BATCH, "steps": 20, "data": {"use": "mixture", "sources": sources}}
    recipe = Recipe.from_document({**document, "data": {**document["data"], "context": 16}})
    data = open_data(recipe, "train")
    assert data is not None
    order = order_for(data, recipe.data, recipe.seed, recipe.batch)
    return Mixture(recipe, specification_of(recipe, data, order), order)


def mixed_run(root: Path, mixture: Mixture) -> SampledRun:
    run = SampledRun(root / "runs")
    run.attempt(0, 9, ranks=2, specification=mixture.specification, order=mixture.order)
    run.attempt(8, 20, ranks=3, specification=mixture.specification, order=mixture.order)
    for attempt in (1, 2):
        run.run.attempt_path(attempt).mkdir()
        (run.run.attempt_path(attempt) / "recipe.yaml").write_text(mixture.recipe.to_yaml())
    return run


def plain_run(root: Path) -> SampledRun:
    run = SampledRun(root / "runs")
    run.attempt(0, 20, ranks=2)
    run.run.attempt_path(1).mkdir()
    (run.run.attempt_path(1) / "recipe.yaml").write_text("name: plain\n")  # not needed: the log says it all
    return run


def test_a_run_of_a_mixture_is_proven_source_by_source(tmp_path: Path, mixture: Mixture) -> None:
    code, said = audited(mixed_run(tmp_path, mixture), "--json")
    document = json.loads(said)
    assert (code, document["proven"]) == (0, True)
    assert document["attempts"] == [[1, 0, 8], [2, 8, 20]]
    assert {seen["name"]: seen["found"] for seen in document["seen"]} == {"code": 60, "web": 180}
    code, said = audited(mixed_run(tmp_path / "again", mixture))
    assert code == 0
    assert "proven" in said.splitlines()[0]
    assert "240 samples in 20 steps, on up to 3 data ranks" in said


def test_a_plain_run_is_proven_without_its_data(tmp_path: Path) -> None:
    assert audited(plain_run(tmp_path))[0] == 0


def test_a_difference_is_named_and_exits_with_1(tmp_path: Path) -> None:
    run = plain_run(tmp_path)
    log = run.log(1, 1)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[2]["chunks"][0][2] = "0" * 16
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said = audited(run)
    assert code == 1
    assert "rank 1 got in steps 4, between positions 54 and 59, other samples than the specification says" in said
    document = json.loads(audited(run, "--json")[1])
    assert document["differences"][0]["rank"] == 1
    assert document["differences"][0]["steps"] == [4, 5]


def test_a_lost_log_is_named_as_what_cannot_be_proven(tmp_path: Path) -> None:
    run = plain_run(tmp_path)
    run.log(1, 1).unlink()
    code, said = audited(run)
    assert code == 1
    assert "not proven" in said
    assert "rank 1 of attempt 1 has no log of steps 0 to 19" in said


def test_data_that_is_not_what_it_was_cannot_prove_which_samples_came(tmp_path: Path, mixture: Mixture) -> None:
    run = mixed_run(tmp_path, mixture)
    (tmp_path / "web.txt").write_text("a" * 2500)
    code, said = audited(run)
    assert code == 1
    assert "cannot be rebuilt" in said
    assert "training samples, found" in said


def test_what_is_no_run_or_has_no_recipe_is_bad_input(tmp_path: Path) -> None:
    run = plain_run(tmp_path)
    shutil.rmtree(run.run.attempt_path(1))
    code, said = audited(run, "--json")
    assert code == 2
    assert "no attempt of this run has a recipe" in json.loads(said)["error"]["message"]
    assert CliRunner().invoke(app, ["audit", "nothing", "--runs", str(tmp_path / "runs")]).exit_code == 2
