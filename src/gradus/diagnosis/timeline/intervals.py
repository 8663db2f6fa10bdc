"""Intervals: sets of moments as sorted, disjoint pairs of start and end, and the arithmetic of such sets.

A set is an array of shape (n, 2). Everything is done by sorting and cumulative sums: millions of intervals take a
second or two.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]
NOTHING: Intervals = np.zeros((0, 2))


def union(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> Intervals:
    """The set that all of these intervals cover together. Those without a length cover nothing."""
    longer = ends > starts
    starts, ends = starts[longer], ends[longer]
    if not len(starts):
        return NOTHING
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    begins = np.concatenate([[True], starts[1:] > ends[:-1]])  # those that start after everything before has ended
    first = np.flatnonzero(begins)
    last = np.concatenate([first[1:] - 1, [len(ends) - 1]])
    return np.stack([starts[first], ends[last]], axis=1)


def joined(*sets: Intervals) -> Intervals:
    """What is in at least one of the sets."""
    together = np.concatenate(sets) if sets else NOTHING
    return union(together[:, 0], together[:, 1])


def common(one: Intervals, other: Intervals) -> Intervals:
    """What is in both sets."""
    if not len(one) or not len(other):
        return NOTHING
    # For each interval of one, those of the other that it meets: from the first that ends after its start ...
    first = np.searchsorted(other[:, 1], one[:, 0], side="right")
    after = np.searchsorted(other[:, 0], one[:, 1], side="left")  # ... to the last that starts before its end
    counts = np.maximum(after - first, 0)
    mine = np.repeat(np.arange(len(one)), counts)
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    theirs = np.repeat(first, counts) + np.arange(len(mine)) - begins
    starts = np.maximum(one[mine, 0], other[theirs, 0])
    ends = np.minimum(one[mine, 1], other[theirs, 1])
    return union(starts, ends)


def without(one: Intervals, other: Intervals) -> Intervals:
    """What is in one set and not in the other."""
    if not len(one) or not len(other):
        return one
    return common(one, complement(other, float(one[0, 0]), float(one[-1, 1])))


def complement(one: Intervals, start: float, end: float) -> Intervals:
    """What is between two moments and not in the set."""
    inside = clipped(one, start, end)
    starts = np.concatenate([[start], inside[:, 1]])
    ends = np.concatenate([inside[:, 0], [end]])
    return union(starts, ends)


def clipped(one: Intervals, start: float, end: float) -> Intervals:
    """What of the set is between two moments."""
    return union(np.clip(one[:, 0], start, end), np.clip(one[:, 1], start, end))


def closed(one: Intervals, holes_below: float) -> Intervals:
    """The set with its small holes filled."""
    if not len(one):
        return one
    begins = np.concatenate([[True], one[1:, 0] - one[:-1, 1] >= holes_below])
    first = np.flatnonzero(begins)
    last = np.concatenate([first[1:] - 1, [len(one) - 1]])
    return np.stack([one[first, 0], one[last, 1]], axis=1)


def length(one: Intervals) -> float:
    return float((one[:, 1] - one[:, 0]).sum())
