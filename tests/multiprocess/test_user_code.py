"""Code of a user's own: what it may do, and what is explained when it does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import user_code
from pool import Pool
from user_runs import HERE, attempt, line_recipe

from gradus.record.directory import RunDirectory


def test_ranks_that_see_different_data_are_refused_with_the_numbers(pool: Pool, run: RunDirectory) -> None:
    recipe = line_recipe(data={"use": f"{HERE}:more_points_on_rank_1"})
    with pytest.raises(AssertionError, match=r"do not agree on the number of training samples: \[58, 72\]"):
        pool.run(2, user_code.on_unequal_ranks, str(run.path), recipe)


def test_ranks_that_see_other_samples_of_the_same_number_are_refused(pool: Pool, run: RunDirectory) -> None:
    recipe = line_recipe(data={"use": f"{HERE}:other_points_on_rank_1"})
    with pytest.raises(AssertionError, match=r"not the same on all nodes; ranks that see other samples than rank 0: 1"):
        pool.run(2, user_code.on_unequal_ranks, str(run.path), recipe)


@pytest.mark.parametrize("mesh", [{"replicate": 2}, {"shard": 2}], ids=str)
def test_ranks_that_build_different_models_are_refused_before_they_wait_for_each_other(
    pool: Pool, run: RunDirectory, mesh: dict[str, int]
) -> None:
    recipe = line_recipe(model={"use": f"{HERE}:deeper_on_rank_1"}, plan={"mesh": mesh})
    with pytest.raises(AssertionError, match=r"do not agree on the number of parameters: \[5, 7\]"):
        pool.run(2, user_code.on_unequal_ranks, str(run.path), recipe)


def test_unused_parameters_are_named(pool: Pool, run: RunDirectory) -> None:
    recipe = line_recipe(model={"use": f"{HERE}:WithUnused"})
    with pytest.raises(AssertionError, match=r"unused\.weight"):
        attempt(pool, run, recipe, ranks=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": None}, r"does not take what the data gives: a tuple of 2"),
        (
            {"model": {"use": f"{HERE}:TakesOther"}, "loss": "mse"},
            r"forward\(x.*, z.*\).* does not take what the data gives",
        ),
    ],
)
def test_a_batch_that_does_not_fit_the_model_is_explained(
    pool: Pool, run: RunDirectory, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        attempt(pool, run, line_recipe(**changes))


def test_numbers_of_numpy_reach_the_model_in_its_own_precision(pool: Pool, run: RunDirectory) -> None:
    recipe = line_recipe(data={"use": f"{HERE}:NumpyPoints"})
    assert attempt(pool, run, recipe)[0]["state"] == "finished"
