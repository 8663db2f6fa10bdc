"""Ranks that share a GPU, and GPUs that are taken for smaller ones."""

from __future__ import annotations

import pytest
import torch

from gradus.schema.errors import InputError
from gradus.training.device import fraction_of, gpu_of, limit_memory

GIB = 2**30


def test_neighbours_share_a_gpu() -> None:
    assert [gpu_of(rank, 2, 1) for rank in range(2)] == [0, 1]
    assert [gpu_of(rank, 2, 3) for rank in range(6)] == [0, 0, 0, 1, 1, 1]


def test_a_rank_without_a_gpu_is_refused_with_the_numbers() -> None:
    with pytest.raises(InputError, match=r"rank 2 has no GPU; this node has 2$"):
        gpu_of(2, 2, 1)
    with pytest.raises(InputError, match="rank 4 has no GPU; this node has 2 for 2 ranks each"):
        gpu_of(4, 2, 2)


def test_a_limit_is_a_part_of_the_gpu() -> None:
    assert fraction_of(32, 128 * GIB) == 0.25
    with pytest.raises(InputError, match=r"plan.memory_limit_gib: found 200, but the GPU has 128.0"):
        fraction_of(200, 128 * GIB)


def test_a_cpu_has_no_limit() -> None:
    limit_memory(torch.device("cpu"), 0.001)
    assert torch.zeros(2**20).numel() == 2**20
