"""Block-wise shuffle: samples that lie together are read together, and still come in an order of their own each epoch.

Random reads of single samples make parallel file systems slow. Here, an epoch goes through blocks of consecutive
samples in random order, and mixes the samples of a few blocks at a time: whoever reads a window of the stream touches
no more than these blocks. A pure function of (seed, epoch, offset), like the plain order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import Indices, Words, mix, noise, permuted
from gradus.schema.stable_hash import stable_hash


@dataclass(frozen=True)
class BlockShuffled:
    seed: int
    length: int
    block: int  # samples
    window: int  # blocks whose samples are mixed with each other

    @property
    def blocks(self) -> int:
        """Blocks in the dataset. The last one may be short."""
        return -(-self.length // self.block)

    @property
    def missing(self) -> int:
        """What the short block lacks."""
        return self.blocks * self.block - self.length

    def at(self, positions: NDArray[Any]) -> Indices:
        epochs, offsets = np.divmod(np.asarray(positions).astype(np.int64), self.length)
        epoch_keys = mix(noise(stable_hash("blocks", self.seed), epochs))
        # An epoch is a row of places for blocks. The short block comes anywhere in it.
        short_at = (mix(epoch_keys) % np.uint64(self.blocks)).astype(np.int64)
        windows = self._place(offsets, short_at) // self.window
        starts, ends = self._start(windows * self.window, short_at), self._start((windows + 1) * self.window, short_at)
        window_keys = mix(epoch_keys ^ noise(stable_hash("window", self.seed), windows))
        inside = np.empty_like(offsets)
        sizes = ends - starts
        for size in np.unique(sizes).tolist():  # a whole window, the last one, and those with the short block in them
            of_size = sizes == size
            inside[of_size] = permuted(window_keys[of_size], size, (offsets - starts)[of_size])
        mixed = starts + inside
        places = self._place(mixed, short_at)
        return self._blocks_at(places, short_at, epoch_keys) * self.block + mixed - self._start(places, short_at)

    def _place(self, offsets: Indices, short_at: Indices) -> Indices:
        """The place in its epoch in which each offset lies."""
        beyond = offsets >= (short_at + 1) * self.block - self.missing
        return (offsets + beyond * self.missing) // self.block

    def _start(self, places: Indices, short_at: Indices) -> Indices:
        """The offset at which each place begins."""
        places = np.minimum(places, self.blocks)
        return places * self.block - (places > short_at) * self.missing

    def _blocks_at(self, places: Indices, short_at: Indices, epoch_keys: Words) -> Indices:
        last = self.blocks - 1
        found = np.full(places.shape, last, np.int64)
        others = places != short_at
        if others.any():
            which = places[others] - (places[others] > short_at[others])
            found[others] = permuted(epoch_keys[others], last, which)
        return found
