"""The global order: which sample is at which position of the stream, as a pure function of (seed, epoch, offset).

Nothing is shuffled, stored or communicated. Each epoch is a keyed permutation, evaluated where it is needed: any rank
can ask for any position, a resumed run needs no state, and a dataset of 2**60 samples costs what one of ten does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradus.schema.stable_hash import stable_hash

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

MAX_LENGTH = 2**62
# Four rounds do for large datasets. With fewer than ten, the orders of three or four samples are not equally likely.
ROUNDS = 10
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: consecutive multiples are spread over all bits


Ranges = Sequence[tuple[int, int]]  # (first, one past the last), ascending and apart


class Order(Protocol):
    """Which sample of a dataset is at which position of an endless stream. A pure function: no state, any rank."""

    @property
    def length(self) -> int:
        """Positions in one epoch."""

    def at(self, positions: NDArray[Any]) -> Indices:
        """The numbers of the samples at these positions."""


@dataclass(frozen=True)
class Shuffled:
    """Each epoch in an order of its own."""

    seed: int
    length: int

    def at(self, positions: NDArray[Any]) -> Indices:
        return indices_at(self.seed, self.length, positions)


@dataclass(frozen=True)
class AsLaid:
    """Each epoch as the samples lie."""

    length: int

    def at(self, positions: NDArray[Any]) -> Indices:
        return np.asarray(positions).astype(np.int64) % self.length


def past_skipped(numbers: NDArray[Any], skipped: Ranges) -> Indices:
    """The position of the k-th sample of a stream in which some ranges of positions are left out."""
    positions = np.asarray(numbers).astype(np.int64)
    for first, end in skipped:
        positions = np.where(positions >= first, positions + (end - first), positions)
    return positions


def mix(words: Words) -> Words:
    """A bijection of 64-bit words in which each input bit flips each output bit about half of the time."""
    mixed: Words = words ^ (words >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def noise(key: int, counters: NDArray[Any]) -> Words:
    """Random words, one for each counter, as a pure function of (key, counter). Take keys from `stable_hash`."""
    return mix(np.asarray(counters).astype(np.uint64) * GOLDEN + np.uint64(key))


def permuted(key: int | Words, length: int, offsets: NDArray[Any]) -> Indices:
    """What the permutation of 0..length-1 selected by `key` has at each of `offsets`. `key`: one, or one per offset."""
    assert 0 <= length <= MAX_LENGTH, f"length {length} is not in 0..2**62"
    values = np.asarray(offsets).astype(np.uint64)
    if length == 1 or values.size == 0:
        return np.zeros(values.shape, np.int64)
    assert int(values.max()) < length, f"offset {int(values.max())} is not below length {length}"

    keys = np.broadcast_to(np.asarray(key, np.uint64), values.shape)
    round_keys = mix(keys + (np.arange(1, ROUNDS + 1, dtype=np.uint64) * GOLDEN)[:, None])
    half_bits = ((length - 1).bit_length() + 1) // 2
    values = _feistel(round_keys, half_bits, values)
    # The network permutes a power of four, less than 4 x length. What lands outside walks on along its cycle until it
    # is inside again; it must, because it started inside.
    outside = np.flatnonzero(values >= length)
    while outside.size:
        values[outside] = _feistel(round_keys[:, outside], half_bits, values[outside])
        outside = outside[values[outside] >= length]
    return values.astype(np.int64)


def _feistel(round_keys: Words, half_bits: int, values: Words) -> Words:
    """A keyed permutation of the words of 2 x half_bits bits."""
    shift, keep_top = np.uint64(half_bits), np.uint64(64 - half_bits)
    left, right = values >> shift, values & np.uint64((1 << half_bits) - 1)
    for keys in round_keys:
        left, right = right, left ^ (mix(keys ^ right) >> keep_top)
    joined: Words = (left << shift) | right
    return joined


def sample_indices(seed: int, length: int, start: int, count: int) -> Indices:
    """The dataset indices at positions start..start+count-1 of the endless stream of epochs."""
    assert start >= 0, f"position {start} is negative"
    assert count >= 0, f"count {count} is negative"
    return indices_at(seed, length, np.arange(start, start + count, dtype=np.uint64))


def indices_at(seed: int, length: int, positions: NDArray[Any]) -> Indices:
    """The dataset indices at any positions of the stream; many at once cost far less than one by one."""
    epochs, offsets = np.divmod(positions.astype(np.uint64), np.uint64(length))
    return permuted(mix(noise(stable_hash("order", seed), epochs)), length, offsets)
