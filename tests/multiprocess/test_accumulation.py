"""Accumulation of 16-bit gradients over micro-batches and ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pool import Pool
from user_runs import HERE, attempt, line_recipe

from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics


def weights(pool: Pool, folder: Path, ranks: int, accumulate: int) -> dict[str, torch.Tensor]:
    run = RunDirectory.create(folder, "run")
    recipe = line_recipe(
        model={"use": f"{HERE}:Bf16Line"},
        data={"use": f"{HERE}:all_points_to_train"},
        batch=64,
        steps=1,
        optimizer={"use": "sgd", "lr": 1.0},
        plan={"accumulate": accumulate},
    )
    results = attempt(pool, run, recipe, ranks=ranks)
    assert read_metrics(run)[-1]["step"] == 1
    for other in results[1:]:
        assert torch.equal(other["weights"]["weight"], results[0]["weights"]["weight"])
    found: dict[str, torch.Tensor] = results[0]["weights"]
    return found


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 16), (2, 8), (4, 4)])
def test_many_micro_batches_give_the_gradient_of_one(pool: Pool, tmp_path: Path, ranks: int, accumulate: int) -> None:
    at_once = weights(pool, tmp_path, 1, 1)["weight"].double()
    cut_up = weights(pool, tmp_path, ranks, accumulate)["weight"].double()
    one_rounding = 2.0**-8 * at_once.abs().max()
    assert (cut_up - at_once).abs().max() <= 2 * one_rounding
