"""How often each sample came: positions as few numbers, and counters of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.lineage import Rows
from gradus.data.order import Indices
from gradus.data.sample_log import expanded

AT_ONCE = 2**20  # positions in memory
MOST_COUNTED = 2**31  # samples of a dataset for each of which a counter is kept

Parts = Mapping[str, tuple[int, int]]  # of a mixture: the first sample number of each source, and its samples


def between(rows: Rows, start: int, stop: int) -> Rows:
    """Of the samples that rows list one after the other, those numbered from `start` up to `stop`."""
    found: list[tuple[int, int, int, int]] = []
    at = 0
    for first, length, stride, times in rows:
        low, high = max(start - at, 0), min(stop - at, length * times)
        at += length * times
        while low < high:
            span, offset = divmod(low, length)
            if offset or high - low < length:
                taken = min(length - offset, high - low)
                found.append((first + stride * span + offset, taken, 0, 1))
            else:
                whole = (high - low) // length
                taken = whole * length
                found.append((first + stride * span, length, stride, whole))
            low += taken
    return tuple(found)


def pieces(rows: Rows) -> Iterator[Indices]:
    """All positions of rows, not too many at a time."""
    total = sum(length * times for _, length, _, times in rows)
    for start in range(0, total, AT_ONCE):
        yield expanded(between(rows, start, min(start + AT_ONCE, total)))


def times_taken(rows: Rows, start: int, stop: int) -> NDArray[np.int64]:
    """How often each position from `start` up to `stop` is in rows."""
    changes = np.zeros(stop - start + 1, np.int64)
    for first, length, stride, times in rows:
        low, high = 0, times
        if stride:  # only the spans that reach into it
            low = max(0, -((first + length - 1 - start) // stride))
            high = min(times, -((first - stop) // stride))
        begins = first + stride * np.arange(low, high, dtype=np.int64)
        np.add.at(changes, np.clip(begins, start, stop) - start, 1)
        np.add.at(changes, np.clip(begins + length, start, stop) - start, -1)
    return np.cumsum(changes[:-1])


def spans_where(wrong: NDArray[Any], values: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """The runs of one value in an array where something is wrong: first, one past the last, value."""
    changed = np.flatnonzero((values[1:] != values[:-1]) | (wrong[1:] != wrong[:-1])) + 1
    for first, stop in zip([0, *changed.tolist()], [*changed.tolist(), len(values)], strict=True):
        if wrong[first]:
            yield first, stop, int(values[first])


@dataclass(frozen=True)
class Seen:
    """How often the samples of a source were trained on."""

    name: str
    samples: int  # that it has
    expected: int  # times that one of them should have come
    found: int
    fewest: int  # times that any one came
    most: int

    @property
    def evenly(self) -> bool:
        """Whether they took turns: no sample comes again before all have come."""
        return self.fewest >= self.found // self.samples and self.most <= -(-self.found // self.samples)


class Counter:
    """How often each sample of a dataset should have come, and came."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        length = max(offset + count for offset, count in parts.values())
        self._found = np.zeros(length, np.int32) if length <= MOST_COUNTED else None
        self._expected = dict.fromkeys(parts, 0)

    def expect(self, numbers: Indices) -> None:
        for name, (offset, count) in self.parts.items():
            self._expected[name] += int(((numbers >= offset) & (numbers < offset + count)).sum())

    def came(self, numbers: Indices, times: int = 1) -> None:
        """`times` may be -1: they did not come after all."""
        if self._found is not None:
            np.add.at(self._found, numbers, times)

    def seen(self, as_expected: bool) -> list[Seen]:
        """Of each source. If it is known that all is `as_expected`, what was expected need not have been counted."""
        if self._found is None:
            return []
        found = []
        for name, (offset, count) in self.parts.items():
            times = self._found[offset : offset + count]
            total = int(times.sum(dtype=np.int64))
            expected = total if as_expected else self._expected[name]
            found.append(Seen(name, count, expected, total, int(times.min()), int(times.max())))
        return found
