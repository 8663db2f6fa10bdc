"""Two checkpoints are compared by what they hold, however it is divided into files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_parts import save_in_parts
from torch import Tensor

from gradus.checkpoint.difference import Difference, compared, difference
from gradus.checkpoint.manifest import read_manifest, stored_tensors
from gradus.checkpoint.store import DamagedCheckpoint
from gradus.checkpoint.tensor_file import StoredTensor

TENSORS = {
    "model.weight": torch.arange(12.0).view(4, 3),
    "model.bias": torch.tensor([1.0, 2.0]),
    "optimizer.step": torch.tensor(3.0),
}


def opened(path: Path) -> tuple[Mapping[str, Any], Mapping[str, StoredTensor]]:
    manifest = read_manifest(path)
    return manifest, stored_tensors(path, manifest)


def between(tmp_path: Path, a: dict[str, Tensor], b: dict[str, Tensor], **of_b: Any) -> Difference:
    first = save_in_parts(tmp_path / "a", 5, a, 1, {"samples": 10, "state": {"seed": 1}})
    second = save_in_parts(tmp_path / "b", 5, b, 3, {"samples": 10, "state": {"seed": 1}, **of_b})
    return difference(opened(first), opened(second))


def test_the_same_in_one_part_and_in_three_is_equal(tmp_path: Path) -> None:
    found = between(tmp_path, TENSORS, TENSORS)
    assert found.same
    assert (found.equal, found.document()["same"]) == (3, True)


def test_names_shapes_and_types_that_differ_are_told_apart(tmp_path: Path) -> None:
    other = {"model.weight": TENSORS["model.weight"].view(3, 4), "model.bias": TENSORS["model.bias"].double()}
    found = between(tmp_path, TENSORS, {**other, "model.new": torch.ones(1)})
    assert not found.same
    assert (found.only_first, found.only_second) == (("optimizer.step",), ("model.new",))
    assert [(kind.name, kind.first, kind.second) for kind in found.kinds] == [
        ("model.bias", "F32 [2]", "F64 [2]"),
        ("model.weight", "F32 [4, 3]", "F32 [3, 4]"),
    ]
    assert found.numbers == ()


def test_numbers_are_sorted_by_their_largest_difference(tmp_path: Path) -> None:
    changed = {name: tensor.clone() for name, tensor in TENSORS.items()}
    changed["model.weight"][2, 1] += 0.5
    changed["model.weight"][0, 0] -= 0.25
    changed["model.bias"][1] = 5.0
    found = between(tmp_path, TENSORS, changed)
    assert [one.name for one in found.numbers] == ["model.bias", "model.weight"]
    bias, weight = found.numbers
    assert (bias.largest, bias.different, bias.elements) == (3.0, 1, 2)
    assert bias.relative == pytest.approx(3 / math.sqrt(1 + 25))
    assert (weight.largest, weight.different) == (0.5, 2)
    assert found.equal == 1


def test_state_that_is_no_tensor_is_compared_by_its_names(tmp_path: Path) -> None:
    state = {"seed": 2, "training": {"step": 5}}
    found = between(tmp_path, TENSORS, TENSORS, samples=20, recipe_hash="12", state=state)
    assert {one.name: (one.first, one.second) for one in found.state} == {
        "samples": (10, 20),
        "recipe_hash": (None, "12"),
        "seed": (1, 2),
        "training.step": (None, 5),
    }
    assert not found.same


@pytest.mark.parametrize(
    ("a", "b", "different", "not_finite", "largest"),
    [
        ([math.nan, 1.0], [math.nan, 1.0], 0, 0, None),
        ([math.nan, 1.0], [0.0, 1.0], 1, 1, None),
        ([math.inf, 1.0], [math.inf, 2.0], 1, 0, 1.0),
        ([-0.0, 1.0], [0.0, 1.0], 0, 0, None),
        ([math.inf, 1.0], [-math.inf, 1.5], 2, 1, 0.5),
    ],
)
def test_what_is_not_finite_is_counted_and_not_measured(
    a: list[float], b: list[float], different: int, not_finite: int, largest: float | None
) -> None:
    found = compared("x", torch.tensor(a), torch.tensor(b))
    if not different:
        assert found is None
        return
    assert found is not None
    assert (found.different, found.not_finite, found.largest) == (different, not_finite, largest)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int16, torch.uint16, torch.uint64),
        *(torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64),
    ],
)
def test_all_types_that_a_checkpoint_holds_are_compared(dtype: torch.dtype) -> None:
    zeros, ones = torch.zeros(5).to(dtype), torch.ones(5).to(dtype)
    assert compared("x", zeros, zeros.clone()) is None
    found = compared("x", zeros, ones)
    assert found is not None
    assert (found.different, found.largest, found.relative) == (5, 1.0, 1.0)


def test_whole_numbers_beyond_the_reach_of_a_double_differ() -> None:
    found = compared("x", torch.tensor([2**62]), torch.tensor([2**62 + 1]))
    assert found is not None
    assert found.different == 1


def test_damage_is_not_compared_but_told(tmp_path: Path) -> None:
    first, second = (save_in_parts(tmp_path / name, 5, TENSORS, 2) for name in "ab")
    file = sorted(second.glob("part-*"))[1]
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DamagedCheckpoint, match=file.name):
        difference(opened(first), opened(second))
