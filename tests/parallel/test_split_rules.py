"""The rules about splits, which do without torch, know what torch and its users do."""

from __future__ import annotations

from typing import Any

import pytest
from pool import Pool
from schedule_cases import accepted_by_torch

from gradus.parallel.split_rules import TENSOR_STYLES, micro_batches_fit
from gradus.schema.plan import Mesh, Plan


@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("zero-bubble", 1)]
)
def test_the_numbers_of_micro_batches_are_those_that_torch_accepts(pool: Pool, schedule: Any, per_rank: int) -> None:
    counts = list(range(1, 14))
    for ranks in (2, 4):
        plans = [Plan(mesh=Mesh(pipeline=ranks), pipeline_schedule=schedule, accumulate=count) for count in counts]
        expected = [plan.accumulate for plan in plans if micro_batches_fit(plan)]
        assert pool.run(ranks, accepted_by_torch, schedule, per_rank, counts) == [expected] * ranks


def test_the_styles_are_those_that_tensor_parallelism_knows():
    from gradus.parallel.tensor import REPLICATE, STYLES

    assert set(TENSOR_STYLES) == {*STYLES, REPLICATE}
