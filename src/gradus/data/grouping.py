"""Grouping by length: batches of samples that are about equally long need little padding.

The stream is cut into windows of some batches. Inside each, samples are sorted by length and cut into batches, and the
batches come in random order; what is in a window stays as it was, and so every sample still comes once in an epoch.
Windows belong to the stream, not to ranks: on any number of them, a step has the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import Indices, Order, permuted
from gradus.schema.stable_hash import stable_hash

WINDOWS_KEPT = 4
NOTED_SAMPLES = 2**16  # of which the padding is reported: a tenth of a second (AMD EPYC, November 2026)


@dataclass(frozen=True, eq=False)
class Grouped:
    order: Order  # in which samples come into the windows
    lengths: NDArray[Any]  # of all samples
    seed: int
    batch: int  # samples
    window: int  # batches
    _kept: dict[int, Indices] = field(default_factory=dict, repr=False)

    @property
    def length(self) -> int:
        return self.order.length

    def at(self, positions: NDArray[Any]) -> Indices:
        positions = np.asarray(positions, np.int64)
        windows, offsets = np.divmod(positions, self.window * self.batch)
        found = np.empty_like(positions)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            found[chosen] = self._window(window)[offsets[chosen]]
        return found

    def note(self, samples: int) -> str:
        """How much of the batches is padding, with and without grouping."""
        noted = min(samples, NOTED_SAMPLES)
        positions = np.arange(noted)
        before, after = (padding_share(self.lengths[order.at(positions)], self.batch) for order in (self.order, self))
        of = "" if noted == samples else f" of the first {noted:,} samples"
        return f"grouped by length: padding is {after:.1%} of the batches{of}; it would be {before:.1%} ungrouped"

    def _window(self, number: int) -> Indices:
        if number not in self._kept:
            if len(self._kept) >= WINDOWS_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[number] = np.concatenate([self._grouped(*span) for span in self._spans(number)])
        return self._kept[number]

    def _spans(self, window: int) -> Iterator[tuple[int, int]]:
        """The positions of a window, cut where an epoch ends: samples must not come into another one."""
        start, end = window * self.window * self.batch, (window + 1) * self.window * self.batch
        while start < end:
            epoch_end = (start // self.length + 1) * self.length
            yield start, min(end, epoch_end)
            start = epoch_end

    def _grouped(self, start: int, end: int) -> Indices:
        samples = self.order.at(np.arange(start, end))
        by_length = samples[np.argsort(self.lengths[samples], kind="stable")]
        # Batches as steps have them: where an epoch ends in the middle of one, a part of it is on either side.
        first_border = (start // self.batch + 1) * self.batch
        borders = np.array([start, *range(first_border, end, self.batch), end])
        sizes = np.diff(borders)
        turns = permuted(stable_hash("groups", self.seed, start), len(sizes), np.arange(len(sizes)))
        starts = np.empty_like(sizes)
        starts[turns] = np.cumsum(sizes[turns]) - sizes[turns]  # in the sorted samples, of each batch
        grouped: Indices = by_length[np.arange(end - start) + np.repeat(starts - (borders[:-1] - start), sizes)]
        return grouped

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}


def padding_share(lengths: NDArray[Any], batch: int) -> float:
    """How much is padding if each batch is as wide as its longest sample."""
    lengths = np.asarray(lengths, np.int64)
    starts = np.arange(0, len(lengths), batch)
    widths = np.maximum.reduceat(lengths, starts)
    places = int((widths * np.diff([*starts, len(lengths)])).sum())
    return 1 - int(lengths.sum()) / places if places else 0.0
