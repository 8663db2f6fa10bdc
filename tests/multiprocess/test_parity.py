"""The loss does not care how many ranks there are: float64 curves and weights agree with those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from training_cases import MODELS, STEPS, recipe_for, run_on


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each model's float64 curve on one rank, computed once."""
    known: dict[str, Any] = {}

    def of(model: str) -> Any:
        if model not in known:
            recipe = recipe_for(model, plan={"precision": "fp64"})
            known[model] = run_on(pool, 1, tmp_path_factory.mktemp("alone"), recipe)
        return known[model]

    return of


CASES = [(model, ranks, 1) for model in MODELS for ranks in (2, 3, 4)] + [("gpt", ranks, 2) for ranks in (1, 2, 3)]


@pytest.mark.parametrize(("model", "ranks", "accumulate"), CASES)
def test_float64_curve_is_the_same_on_any_number_of_ranks(
    pool: Pool, alone: Any, tmp_path: Path, model: str, ranks: int, accumulate: int
) -> None:
    expected_rows, expected_weights = alone(model)
    recipe = recipe_for(model, plan={"precision": "fp64", "accumulate": accumulate})
    rows, weights = run_on(pool, ranks, tmp_path, recipe)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-9)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9)
    assert rows[-1]["validation_loss"] == pytest.approx(expected_rows[-1]["validation_loss"], rel=1e-9)
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        scale = expected_weights[name].abs().max().clamp(min=1e-30)
        assert ((weight - expected_weights[name]).abs().max() / scale).item() < 1e-9, name
