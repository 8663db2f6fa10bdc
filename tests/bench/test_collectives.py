"""Collectives are measured with bandwidths that mean what nccl-tests mean, and what arrives is checked exactly."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from gradus.bench.collectives import DTYPES, OPERATIONS, Row, bus_factor, measured, pattern, summed
from gradus.parallel.world import World

CPU = torch.device("cpu")


def rows_of(world: World, size: int, dtype: str) -> list[Row]:
    return [measured(operation, size, DTYPES[dtype], CPU, seconds=0.0) for operation in OPERATIONS]


@pytest.mark.parametrize(("ranks", "size", "dtype"), [(2, 4096, "float32"), (3, 1000, "bfloat16"), (2, 8, "int64")])
def test_every_operation_arrives_exactly_on_every_rank(pool: Pool, ranks, size, dtype):
    for rows in pool.run(ranks, rows_of, size, dtype):
        assert [row.operation for row in rows] == list(OPERATIONS)
        assert [row.wrong for row in rows] == [0] * len(OPERATIONS)
        assert all(row.bytes <= max(size, ranks * DTYPES[dtype].itemsize) for row in rows)


def wrong_by_one(world: World) -> int:
    """As on a network that flips a bit: rank 1 gets another number than was sent."""
    all_reduce = dist.all_reduce

    def broken(tensor, *arguments, **keywords):
        result = all_reduce(tensor, *arguments, **keywords)
        if tensor.dtype == torch.float32 and world.rank == 1:
            tensor[5] += 1
        return result

    dist.all_reduce = broken
    try:
        return measured("all-reduce", 4096, torch.float32, CPU, seconds=0.0).wrong
    finally:
        dist.all_reduce = all_reduce


def test_one_wrong_element_on_one_rank_is_counted_on_all(pool: Pool):
    assert pool.run(2, wrong_by_one) == [1, 1]


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("ranks", [1, 2, 7, 64, 1024])
def test_patterns_add_up_to_numbers_that_the_type_holds_exactly(dtype, ranks):
    total = sum(pattern(rank, ranks, 500, dtype, CPU).to(torch.float64) for rank in range(ranks))
    assert torch.equal(total, summed(ranks, 500, dtype, CPU).to(torch.float64))
    assert total.max() > 0


def test_patterns_differ_between_ranks_and_move_with_their_start():
    first, second = (pattern(rank, 2, 500, torch.float32, CPU) for rank in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(pattern(0, 2, 100, torch.float32, CPU, start=37), first[37:137])


def test_bandwidths_are_those_of_nccl_tests():
    assert bus_factor("all-reduce", 8) == 1.75
    assert bus_factor("all-gather", 8) == bus_factor("reduce-scatter", 8) == bus_factor("all-to-all", 8) == 0.875
    assert bus_factor("broadcast", 8) == bus_factor("p2p", 8) == 1
    row = Row("all-reduce", "float32", 1_000_000_000, 8, 0.5, 0)
    assert row.algorithm_gb_per_second == 2.0
    assert row.document()["bus_gb_per_second"] == 3.5
