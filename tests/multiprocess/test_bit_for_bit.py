"""In deterministic mode a run repeats bit for bit, and a stopped and resumed run is the one that was never stopped."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from training_cases import MODELS, Trained, recipe_for, run_on, same_weights, trained

from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.recipe import Recipe

STEPS = 14
# Times differ between runs; everything else has to be the same.
MEASURED = ("_seconds", "per_second", "memory_peak_bytes", "attempt", "mfu")


def recipe() -> Recipe:
    model = {**MODELS["gpt"]["model"], "dropout": 0.1}
    return recipe_for("gpt", model=model, steps=STEPS, deterministic=True, evaluate={"every": 4, "batches": 2})


def facts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not any(word in k for word in MEASURED)} for row in rows]


def assert_identical(found: Trained, expected: Trained) -> None:
    assert facts(found.rows) == facts(expected.rows)
    for name, weight in found.weights.items():
        assert torch.equal(weight, expected.weights[name]), name


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Trained]:
    """What the recipe gives on so many ranks, trained once for all tests."""
    return cache(lambda ranks: run_on(pool, ranks, tmp_path_factory.mktemp("undisturbed"), recipe()))


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_repeated_run_is_identical(
    pool: Pool, tmp_path: Path, undisturbed: Callable[[int], Trained], ranks: int
) -> None:
    second = run_on(pool, ranks, tmp_path, recipe())
    assert len(second.rows) == STEPS
    assert_identical(second, undisturbed(ranks))


@pytest.mark.parametrize(("ranks", "stop_step"), [(1, 6), (3, 1), (4, 6)])
def test_a_stopped_and_resumed_run_is_identical_to_one_never_stopped(
    pool: Pool, tmp_path: Path, undisturbed: Callable[[int], Trained], ranks: int, stop_step: int
) -> None:
    run = RunDirectory.create(tmp_path, "stopped")
    first = pool.run(ranks, trained, str(run.path), recipe(), 1, stop_step)
    assert {result["state"] for result in first} == {"stopped"}
    stopped_at = {result["step"] for result in first}
    assert len(stopped_at) == 1, "all ranks stop at the same step"
    assert stop_step <= min(stopped_at) < STEPS
    run.stop_file.unlink()
    second = pool.run(ranks, trained, str(run.path), recipe(), 2)
    assert {result["state"] for result in second} == {"finished"}
    assert_identical(Trained(read_metrics(run), same_weights(second), run), undisturbed(ranks))


def test_dropout_is_on(pool: Pool, tmp_path: Path, undisturbed: Callable[[int], Trained]) -> None:
    """The tests above would mean little if dropout did nothing."""
    without = run_on(pool, 1, tmp_path, recipe_for("gpt", steps=1, deterministic=True))
    assert undisturbed(1).rows[0]["loss"] != without.rows[0]["loss"]


def test_a_run_stopped_on_four_ranks_goes_on_on_any_other_number(pool: Pool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"steps": STEPS, "plan": {"precision": "fp64"}}
    undisturbed = run_on(pool, 1, tmp_path, recipe_for("gpt", **changes))
    for ranks in (1, 3):
        run = RunDirectory.create(tmp_path, f"on-{ranks}")
        pool.run(4, trained, str(run.path), recipe_for("gpt", **changes), 1, 4)
        run.stop_file.unlink()
        results = pool.run(ranks, trained, str(run.path), recipe_for("gpt", **changes), 2)
        for row, expected in zip(read_metrics(run), undisturbed.rows, strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-9)
        for name, weight in same_weights(results).items():
            assert (weight - undisturbed.weights[name]).abs().max().item() < 1e-9, name
