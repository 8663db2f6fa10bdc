"""Interval arithmetic, against a raster of the same intervals."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradus.diagnosis.timeline import intervals
from gradus.diagnosis.timeline.intervals import Intervals

CELLS = 40
Pairs = list[tuple[int, int]]
PAIRS = st.lists(st.tuples(st.integers(0, CELLS), st.integers(0, CELLS)).map(lambda p: (min(p), max(p))), max_size=12)


def raster(pairs: Pairs) -> np.ndarray:
    cells = np.zeros(CELLS, dtype=bool)
    for start, end in pairs:
        cells[start:end] = True
    return cells


def as_set(pairs: Pairs) -> Intervals:
    values = np.array(pairs, dtype=float).reshape(-1, 2)
    return intervals.union(values[:, 0], values[:, 1])


def cells_of(found: Intervals) -> np.ndarray:
    assert (found[:, 0] < found[:, 1]).all(), "no empty intervals"
    assert (found[1:, 0] > found[:-1, 1]).all(), "sorted, and apart"
    return raster([(int(start), int(end)) for start, end in found])


@given(PAIRS)
def test_a_union_covers_each_moment_once(pairs: Pairs) -> None:
    found = as_set(pairs)
    assert (cells_of(found) == raster(pairs)).all()
    assert intervals.length(found) == raster(pairs).sum()


@given(PAIRS, PAIRS)
def test_common_without_and_joined_are_those_of_sets(one: Pairs, other: Pairs) -> None:
    a, b = as_set(one), as_set(other)
    assert (cells_of(intervals.common(a, b)) == (raster(one) & raster(other))).all()
    assert (cells_of(intervals.without(a, b)) == (raster(one) & ~raster(other))).all()
    assert (cells_of(intervals.joined(a, b)) == (raster(one) | raster(other))).all()


@given(PAIRS, st.integers(0, CELLS), st.integers(0, CELLS))
def test_a_complement_is_what_is_missing_between_two_moments(pairs: Pairs, one: int, other: int) -> None:
    start, end = min(one, other), max(one, other)
    inside = raster([(start, end)])
    assert (cells_of(intervals.complement(as_set(pairs), start, end)) == (inside & ~raster(pairs))).all()
    assert (cells_of(intervals.clipped(as_set(pairs), start, end)) == (inside & raster(pairs))).all()


@given(PAIRS, st.integers(1, 5))
def test_closing_fills_small_holes_and_no_others(pairs: Pairs, below: int) -> None:
    found = as_set(pairs)
    filled = intervals.closed(found, below)
    holes = filled[1:, 0] - filled[:-1, 1]
    assert (holes >= below).all()
    assert intervals.length(intervals.without(found, filled)) == 0
    added = intervals.without(filled, found)
    assert ((added[:, 1] - added[:, 0]) < below).all()
