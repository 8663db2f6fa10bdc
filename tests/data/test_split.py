"""The two sides of a split are disjoint, cover the data, and never change."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.data.split import TEXT_BLOCKS, Part, Split, blocks, held_out, scattered

KINDS = [scattered, blocks]


def members(part: Part) -> list[int]:
    return part.locate(np.arange(part.length)).tolist()


@pytest.mark.parametrize("kind", KINDS)
@given(length=st.integers(0, 2000), fraction=st.floats(0, 1, exclude_max=True))
def test_the_sides_are_disjoint_and_cover_the_data(
    kind: Callable[[int, float, Split], Part], length: int, fraction: float
) -> None:
    train, validation = members(kind(length, fraction, "train")), members(kind(length, fraction, "validation"))
    assert sorted(train + validation) == list(range(length))
    assert len(validation) == held_out(length, fraction)


@pytest.mark.parametrize(
    ("length", "fraction", "expected"),
    [(1000, 0.1, 100), (3, 0.1, 1), (2, 0.9, 1), (1, 0.5, 0), (0, 0.5, 0), (1000, 0.0, 0), (10, 0.999, 9)],
)
def test_validation_gets_at_least_one_sample_but_never_all(length: int, fraction: float, expected: int) -> None:
    assert held_out(length, fraction) == expected


def test_the_split_is_the_one_of_all_versions() -> None:
    assert members(scattered(20, 0.2, "validation")) == [19, 2, 0, 15]
    assert members(blocks(45, 0.1, "validation")) == [10, 21, 32, 44]


def test_training_samples_come_as_they_lie_unless_only_a_few_are_taken() -> None:
    part = scattered(2000, 0.1, "train")
    assert members(part) == sorted(members(part))
    assert members(part.first(5000)) == members(part)
    few = members(part.first(50))
    assert few != sorted(few)
    assert max(few) > 1000, "from anywhere"
    assert set(few) <= set(members(part))
    copy = pickle.loads(pickle.dumps(part))
    assert members(copy) == members(part)


def test_text_is_held_out_in_long_runs_from_all_over() -> None:
    validation = np.array(members(blocks(10_000, 0.1, "validation")))
    runs = np.flatnonzero(np.diff(validation) > 1)
    assert len(runs) + 1 == TEXT_BLOCKS
    assert validation.min() < 1000
    assert validation.max() == 9999


def test_a_split_of_a_huge_dataset_needs_no_table() -> None:
    for kind in KINDS:
        train, validation = kind(2**60, 0.1, "train"), kind(2**60, 0.1, "validation")
        assert train.length + validation.length == 2**60
        ends = np.array([0, validation.length - 1])
        assert (validation.locate(ends) < 2**60).all()
