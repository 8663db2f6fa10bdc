"""Accumulation of 16-bit gradients over micro-batches and ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import user_code
from pool import Pool
from user_runs import HERE, attempt, line_recipe

from gradus.record.directory import RunDirectory


def weight(pool: Pool, folder: Path, ranks: int, dtype: str) -> float:
    """After one step over one large gradient and many small ones, each in a micro-batch of its own."""
    run = RunDirectory.create(folder, "run")
    recipe = line_recipe(
        model={"use": f"{HERE}:Bf16Line"},
        data={"use": f"{HERE}:one_large_and_many_small"},
        batch=64,
        steps=1,
        optimizer={"use": "sgd", "lr": 1.0},
        loss=f"{HERE}:output_itself",
        plan={"micro_batch": 1, "accumulate_dtype": dtype},
    )
    results = attempt(pool, run, recipe, ranks=ranks)
    for other in results[1:]:
        assert torch.equal(other["weights"]["weight"], results[0]["weights"]["weight"])
    return float(results[0]["weights"]["weight"][0, 0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_small_gradients_count_beside_a_large_one(pool: Pool, tmp_path: Path, ranks: int) -> None:
    start = float(user_code.Bf16Line().state_dict()["weight"][0, 0]) * 0  # the model starts at zero
    exact = start - (512 + 63) / 64
    wide = weight(pool, tmp_path, ranks, "fp32")
    assert wide == pytest.approx(exact, rel=2**-7)
    narrow = weight(pool, tmp_path, ranks, "parameters")
    assert abs(narrow - exact) > 2 * abs(wide - exact), "in bf16, 512 + 1 is 512"


def test_ranks_that_used_other_parts_reduce_the_same_ones(pool: Pool) -> None:
    for first, second in pool.run(2, user_code.gradients_of_other_parts):
        assert (first, second) == (2.5, 5.0)  # the means of (5, 0) and (0, 10)
