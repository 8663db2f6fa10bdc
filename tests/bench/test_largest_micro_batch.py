"""The search for the largest micro-batch that fits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tried_models
from hypothesis import given
from hypothesis import strategies as st
from tried_models import recipe_document

from gradus.bench.largest_micro_batch import largest_micro_batch, largest_that_fits, sizes_of, split
from gradus.bench.tried import Ranks, Trial
from gradus.planner.resolve import resolved
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

HERE = Path(tried_models.__file__).parent


@given(st.sets(st.integers(1, 5000), min_size=1), st.integers(1, 6000), st.integers(0, 6000))
def test_the_search_finds_the_largest_and_tries_nothing_twice(sizes: set[int], start: int, limit: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    ordered = sorted(sizes)
    largest, too_large = largest_that_fits(ordered, start, fits)
    assert largest == max((size for size in ordered if size <= limit), default=None)
    assert too_large == min((size for size in ordered if size > limit), default=None)
    assert len(tried) == len(set(tried))


def test_the_search_doubles_and_then_halves_the_gap() -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= 700

    assert largest_that_fits(list(range(1, 10_001)), 4, fits) == (700, 701)
    assert tried[:9] == [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert len(tried) < 20


def test_sizes_divide_the_share_of_a_rank_so_that_the_batch_stays() -> None:
    plan = Plan(mesh=Mesh(replicate=2, shard=2), zero=2, micro_batch=1, accumulate=12)
    assert sizes_of(48, plan) == [1, 2, 3, 4, 6, 12]
    for size in sizes_of(48, plan):
        split(plan, 48, size).check(48, 4)


@pytest.mark.slow
@pytest.mark.long
def test_the_largest_is_found_on_two_ranks_though_trials_run_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(HERE))
    # Rank 1 holds five times 16 MiB for each sample: 320 MiB for four of them, 640 for eight.
    recipe = resolved(Recipe.from_document(recipe_document(32, hungry=16, hungry_rank=1), folder=HERE))
    plan = Plan(mesh=Mesh(replicate=2), micro_batch=2, accumulate=8)
    said: list[str] = []
    with Ranks(2) as ranks:
        trial = Trial(recipe, plan, limit_seconds=200, host_memory_bytes=480 << 20)
        found = largest_micro_batch(ranks, trial, said.append)
    assert (found.micro_batch, found.too_large) == (4, 8), said
    assert found.tried[8].state == "out-of-memory"
    assert found.tried[4].measured
