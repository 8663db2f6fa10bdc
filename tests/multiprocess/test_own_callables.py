"""Whatever a recipe can name, a user can bring: it trains, and the same on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_callables import HERE
from pool import Pool
from training_cases import run_on
from user_runs import line_recipe

STEPS = 6
CASES: dict[str, dict[str, Any]] = {
    "a loss that is a function": {"loss": f"{HERE}:absolute_error"},
    "a loss that returns sum and count": {"loss": {"use": f"{HERE}:weighted_error", "power": 1.5}},
    "a loss that is a module with settings": {"loss": {"use": f"{HERE}:Huber", "delta": 0.5}},
    "a loss of torch": {"loss": {"use": "torch.nn:SmoothL1Loss", "beta": 0.5}},
    "a metric with settings": {
        "metrics": [
            {"use": f"{HERE}:within", "distance": 1.0},
            {"use": f"{HERE}:within", "distance": 3, "name": "near"},
        ]
    },
    "an optimizer of torch": {"optimizer": {"use": "torch.optim:NAdam", "lr": 0.01, "momentum_decay": 0.01}},
    "an optimizer of one's own": {"optimizer": {"use": f"{HERE}:SignDescent", "lr": 0.01, "shrink": 0.999}},
    "a decay": {"optimizer": {"use": "sgd", "lr": 0.01, "decay": f"{HERE}:half_way_down"}},
    "a model by a method of a class": {"model": {"use": f"{HERE}:Zoo.line", "bias": False}},
    "a class of an installed package": {"model": {"use": "torch.nn:Linear", "in_features": 4, "out_features": 1}},
    "data in dicts": {"data": {"use": f"{HERE}:Named"}, "loss": f"{HERE}:weighted_error"},
    "data in dicts of dicts": {
        "data": {"use": f"{HERE}:InDicts"},
        "model": {"use": f"{HERE}:Nested"},
        "loss": None,
    },
    "data with a collate of its own": {"data": {"use": f"{HERE}:OfTexts"}},
}


@pytest.mark.parametrize("case", CASES)
def test_it_trains_the_same_on_one_rank_and_on_two(pool: Pool, tmp_path: Path, case: str) -> None:
    # All samples in each batch, so that the loss falls from step to step.
    recipe = line_recipe(**{"batch": 58, "steps": STEPS, "plan": {"precision": "fp64"}, **CASES[case]})
    one, two = (run_on(pool, ranks, tmp_path, recipe) for ranks in (1, 2))
    assert len(one.rows) == STEPS
    assert one.rows[-1]["loss"] < one.rows[0]["loss"]
    for row, other in zip(two.rows, one.rows, strict=True):
        measured = [key for key in other if key == "loss" or key.startswith("validation_")]
        for key in measured:
            assert row[key] == pytest.approx(other[key], rel=1e-9), key
    if case == "a metric with settings":
        assert one.rows[-1]["validation_within"] <= one.rows[-1]["validation_near"] <= 1.0
    if case == "a decay":
        assert [row["lr"] for row in one.rows] == [0.01] * 3 + [0.001] * 3
