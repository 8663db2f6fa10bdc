"""Checksums: any bit that flips changes one, and of ranks that differ the odd one out is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradus.faults.checksums import Difference, _difference, _holders, checksum

FORMATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8]


def with_flipped_bit(tensor: Tensor, byte: int, bit: int) -> Tensor:
    flipped = tensor.clone()
    flipped.view(-1).view(torch.uint8)[byte] ^= 1 << bit
    return flipped


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("count", [1, 7, 8, 101])
def test_any_single_bit_changes_it(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randn(count).mul(50).to(dtype)
    before = int(checksum(tensor))
    for byte in range(0, count * tensor.element_size(), 5):
        for bit in range(8):
            assert int(checksum(with_flipped_bit(tensor, byte, bit))) != before


def test_bits_are_compared_and_not_numbers() -> None:
    assert int(checksum(torch.tensor([0.0]))) != int(checksum(torch.tensor([-0.0])))
    assert int(checksum(torch.full((4,), float("nan")))) == int(checksum(torch.full((4,), float("nan"))))


def test_how_it_lies_in_memory_makes_no_difference_where_that_is_dense() -> None:
    images = torch.randn(4, 6, 8, 10)
    last = images.to(memory_format=torch.channels_last)
    storage = last.permute(0, 2, 3, 1).contiguous()
    assert int(checksum(last)) == int(checksum(storage))
    assert int(checksum(images.transpose(0, 1))) == int(checksum(images))
    assert int(checksum(images[:, ::2])) == int(checksum(images[:, ::2].contiguous()))
    assert int(checksum(torch.ones(9)[1:])) == int(checksum(torch.ones(9)[1:]))
    assert int(checksum(torch.empty(0, 3))) == 0
    assert int(checksum(torch.randn(4, dtype=torch.complex64))) != 0


def difference(table: list[list[int]], sums: list[list[int]]) -> Difference:
    held = [{row[0]: (["a", "b"], mine)} for row, mine in zip(table, sums, strict=True)]
    return _difference(_holders(table), [f"node{rank}" for rank in range(len(table))], held)


def test_the_majority_is_right() -> None:
    found = difference([[5, 10], [5, 11], [5, 10]], [[1, 2], [1, 3], [1, 2]])
    assert found == Difference("b", (1,), ("node1",), (0, 1, 2), True)
    error = found.error(500, 400)
    assert error.exit_code == 1
    assert (error.kind, error.details["rank"], error.details["node"]) == ("silent-corruption", 1, "node1")
    assert "rank 1 (node node1) of the 3" in error.message
    assert "agreed last at step 400" in error.message


def test_of_two_none_is() -> None:
    error = difference([[5, 10], [5, 11]], [[1, 2], [0, 3]]).error(500, None)
    assert "corruption of a at step 500: ranks 0, 1 (nodes node0, node1)" in error.message
    assert "node" not in error.details
    assert error.details["nodes"] == ["node0", "node1"]


def test_ranks_with_other_parts_are_not_compared() -> None:
    assert _holders([[5, 10, 0, 0], [6, 11, 7, 3]]) == {5: [(0, 10)], 6: [(1, 11)], 7: [(1, 3)]}
