"""Rows that others published: all of them are recipes and plans of ours, and one is predicted in the right region."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradus.parallel.support import check_supported
from gradus.planner.defaults import case_of
from gradus.planner.resolve import resolved
from gradus.schema.plan import Plan

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    import elsewhere

    yield elsewhere
    sys.modules.pop("elsewhere", None)
    sys.path.remove(str(BENCHMARKS))


def test_every_row_is_a_plan_that_can_be_run_on_its_cluster(elsewhere: Any) -> None:
    table = elsewhere.table()
    assert {row["source"] for row in table["rows"]} == set(table["sources"])
    for row in table["rows"]:
        cluster, plan = elsewhere.cluster_of(row), Plan.model_validate(elsewhere.plan_of(row))
        check_supported(case_of(resolved(elsewhere.recipe_of(row)), cluster, plan))
        assert plan.mesh.world_size == row["gpus"], elsewhere.name_of(row)
        assert plan.micro_batch * plan.accumulate * plan.mesh.data_ranks == row["batch"], elsewhere.name_of(row)


def test_a_7b_on_one_h200_is_as_fast_as_it_was_elsewhere(elsewhere: Any) -> None:
    row = next(row for row in elsewhere.table()["rows"] if row["gpus"] == 1)
    found = elsewhere.predicted(row)
    assert abs(found.ratio - 1) < found.stated_error
    text = elsewhere.printed([found])
    assert "Within the error that the prediction states: 1 of 1." in text
    assert f"{found.predicted:,.0f}" in text
