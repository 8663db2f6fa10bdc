"""Mixing: which source each position of a mixture takes its sample from, within one sample of the exact proportion.

After n samples, source k with the share w_k has given between ⌊n·w_k⌋ and ⌈n·w_k⌉ of them, whatever n is. Such a
schedule always exists (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980): sample j of
source k is due at one of the positions ⌊(j-1)/w_k⌋ + 1 to ⌈j/w_k⌉, and taking, of the samples that may come, the one
that must come first (earliest deadline first) keeps all of these windows.

To know the schedule at any position without walking there, it is cut into blocks. How many samples each source has
given at the border between two blocks is chosen from the border alone: every source is there at ⌊n·w_k⌋, and those
that have one more are picked so that, counted in the order in which they could have come, and counted in the order in
which they must come, no more and no fewer of them are picked than their fractions of a sample add up to (`_rounded`).
Then neither the block before nor the one after asks for more samples in any stretch of it than the stretch has
positions, which is all that a schedule needs to exist (Hall's condition), provided that every source gives at least one
sample in every block. Where the weights have a small common period, blocks are whole periods, and all of them are
alike.

All numbers are whole numbers: weights 0.3 and 0.7 are 3 and 7 of 10.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import Indices, Order

# Positions; with other numbers, the schedule is another. To lay out a block takes 0.4 to 1.3 µs of one core for each
# (2 to 60 sources, AMD EPYC, November 2026).
LEAST_BLOCK = 4096
LONGEST_PERIOD = 2**16  # laid out once, as a whole
LARGEST_BLOCK = 2**18  # so a share is at least one in 262,144
BLOCKS_KEPT = 8


@dataclass(frozen=True)
class Phase:
    """A stretch of the stream with the same weights throughout."""

    start: int  # position
    end: int | None  # None: for ever
    weights: tuple[int, ...]  # without a common divisor
    given: tuple[int, ...]  # samples that each source has given before
    given_at_end: tuple[int, ...] | None

    @property
    def period(self) -> int:
        return sum(self.weights)

    @property
    def block(self) -> int:
        """Positions in a block. The last one of a phase is longer, by what is left over."""
        return _block_length(self.weights)

    @property
    def repeats(self) -> bool:
        """Whether all blocks (but the last) are alike."""
        return self.block % self.period == 0

    @property
    def last_block(self) -> int | None:
        return None if self.end is None else max((self.end - self.start) // self.block, 1) - 1

    def border(self, offset: int) -> list[int]:
        """Samples of each source in the first `offset` positions of the phase, where `offset` is between two blocks."""
        if self.end is not None and offset == self.end - self.start:
            assert self.given_at_end is not None
            return [end - start for start, end in zip(self.given, self.given_at_end, strict=True)]
        counts, parts = _whole_and_part(self, offset)
        possible_since = [Fraction(-part, weight or 1) for part, weight in zip(parts, self.weights, strict=True)]
        due_in = [Fraction(self.period - part, weight or 1) for part, weight in zip(parts, self.weights, strict=True)]
        for source in _rounded(parts, self.period, possible_since, due_in):
            counts[source] += 1
        return counts


class Layout(NamedTuple):
    """One block of a schedule."""

    sources: NDArray[np.int16]  # of each position
    before: NDArray[np.int32]  # how many earlier positions of the block have the same source


def schedule_of(changes: Sequence[tuple[int, Sequence[Fraction]]]) -> tuple[Phase, ...]:
    """The phases of a schedule: from which position on sources have which weights. The first position is 0.

    A phase begins with whole samples: what its proportions leave as a fraction at its end is rounded, and the sources
    that are owed most, counted from the very beginning, are rounded up.
    """
    phases: list[Phase] = []
    given = (0,) * len(changes[0][1])
    exact = [Fraction(0)] * len(given)
    for (start, shares), end in zip(changes, [start for start, _ in changes[1:]] + [None], strict=True):
        weights = whole_weights(shares)
        phase = Phase(start, end, weights, given, None)
        if end is not None:
            shares_given = [Fraction(weight * (end - start), phase.period) for weight in weights]
            exact = [before + share for before, share in zip(exact, shares_given, strict=True)]
            given = _given_at_end(phase, end, exact)
            phase = Phase(start, end, weights, phase.given, given)
        phases.append(phase)
    return tuple(phases)


def whole_weights(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """The same proportions as whole numbers, as small as can be."""
    multiple = math.lcm(*(share.denominator for share in shares))
    weights = [int(share * multiple) for share in shares]
    divisor = math.gcd(*weights)
    return tuple(weight // divisor for weight in weights)


def _given_at_end(phase: Phase, end: int, exact: Sequence[Fraction]) -> tuple[int, ...]:
    """Samples that each source has given when a phase ends.

    Nothing depends on when they would have had to come, since the next phase begins anew. Of those that may be rounded
    up, in the sense of `_rounded`, the ones that are owed most are: the best basis of a matroid, found greedily.
    """
    counts, parts = _whole_and_part(phase, end - phase.start)
    totals = [before + count for before, count in zip(phase.given, counts, strict=True)]
    possible_since = [Fraction(-part, weight or 1) for part, weight in zip(parts, phase.weights, strict=True)]
    taken = sum(parts) // phase.period
    units = [range(reached.start, taken) for reached in _reached(parts, phase.period, possible_since)]
    matched: list[int | None] = [None] * taken
    for source in sorted(range(len(parts)), key=lambda source: totals[source] - exact[source]):
        if parts[source] and _match(source, units, matched, set()):
            totals[source] += 1
    return tuple(totals)


def sources_at(schedule: tuple[Phase, ...], positions: NDArray[Any]) -> tuple[NDArray[np.int16], Indices]:
    """For each position its source, and how many samples this source has given before."""
    positions = np.asarray(positions, np.int64)
    sources, numbers = np.empty(positions.shape, np.int16), np.empty(positions.shape, np.int64)
    for phase, first, length, chosen in _by_block(schedule, positions):
        offsets = positions[chosen] - phase.start
        layout = _layout(phase, first, length)
        sources[chosen] = layout.sources[(offsets - first) % length]
        numbers[chosen] = layout.before[(offsets - first) % length]
        numbers[chosen] += np.array(phase.given, np.int64)[sources[chosen]]
        if first:
            numbers[chosen] += np.array(phase.border(first), np.int64)[sources[chosen]]
        else:  # the first block, or all those that are like it
            in_block = np.array(phase.border(length), np.int64)
            numbers[chosen] += offsets // length * in_block[sources[chosen]]
    return sources, numbers


def given_before(schedule: tuple[Phase, ...], position: int) -> list[int]:
    """How many samples each source gives before a position."""
    if position == 0:
        return list(schedule[0].given)
    ((phase, first, length, _),) = _by_block(schedule, np.array([position - 1]))
    offset = position - 1 - phase.start
    repeats, rest = divmod(offset - first, length)
    layout = _layout(phase, first, length)
    here = np.bincount(layout.sources[: rest + 1], minlength=len(phase.weights))
    before = [repeats * count for count in phase.border(length)] if repeats else [0] * len(here)
    start = phase.border(first)
    return [sum(parts) for parts in zip(phase.given, start, before, here.tolist(), strict=True)]


def _by_block(
    schedule: tuple[Phase, ...], positions: Indices
) -> Iterator[tuple[Phase, int, int, NDArray[np.bool_] | slice]]:
    """The blocks in which the positions lie: phase, offset of the block's first position, length, which positions.

    Blocks that are alike are one.
    """
    phases = np.searchsorted([phase.start for phase in schedule], positions, side="right") - 1
    for number in np.unique(phases):
        phase = schedule[number]
        of_phase = phases == number
        blocks = (positions - phase.start) // phase.block
        last = phase.last_block
        if last is not None:
            blocks = np.minimum(blocks, last)
        if phase.repeats:
            blocks = np.where(blocks == (-1 if last is None else last), blocks, 0)
        for block in np.unique(blocks[of_phase]).tolist():
            first = block * phase.block
            length = phase.block if block != last or phase.end is None else phase.end - phase.start - first
            yield phase, first, length, of_phase & (blocks == block)


def _block_length(weights: tuple[int, ...]) -> int:
    period = sum(weights)
    if period <= LONGEST_PERIOD:
        return period * -(-LEAST_BLOCK // period)
    longest_wait = -(-period // min(weight for weight in weights if weight))
    return max(LEAST_BLOCK, 1 << (longest_wait - 1).bit_length())


def _whole_and_part(phase: Phase, offset: int) -> tuple[list[int], list[int]]:
    """Exact counts after `offset` positions of a phase: whole samples, and what is left, in parts of a period."""
    pairs = [divmod(offset * weight, phase.period) for weight in phase.weights]
    return [whole for whole, _ in pairs], [part for _, part in pairs]


def _rounded(parts: Sequence[int], whole: int, first: Sequence[Fraction], second: Sequence[Fraction]) -> list[int]:
    """Which of the parts are rounded up to a whole, the others to nothing, so that the sum stays.

    By each of two orders, `first` and `second`, the parts are laid end to end and cut into wholes; from each of these
    wholes exactly one part is taken that lies in it, or reaches into it. So as many are taken of the first few as they
    add up to, rounded up or down. That it can be done follows from the parts themselves, which do it in fractions: it
    is a flow with whole capacities.
    """
    candidates = [source for source, part in enumerate(parts) if part]
    count = len(candidates)
    taken = sum(parts) // whole
    if taken == 0:
        return []
    of_first, of_second = (
        _reached([parts[source] for source in candidates], whole, [key[source] for source in candidates])
        for key in (first, second)
    )
    # A perfect matching. Left: wholes of the first order, then each candidate's way out; right: each candidate's way
    # in, then wholes of the second order. A candidate whose ways are matched with each other is not taken.
    edges: list[Sequence[int]] = [[i for i in range(count) if unit in of_first[i]] for unit in range(taken)]
    edges += [[i, *(count + unit for unit in of_second[i])] for i in range(count)]
    matched: list[int | None] = [taken + i for i in range(count)] + [None] * taken

    for unit in range(taken):
        found = _match(unit, edges, matched, set())
        assert found, f"parts {parts} of {whole} cannot be rounded"
    return [source for i, source in enumerate(candidates) if (left := matched[i]) is not None and left < taken]


def _match(left: int, edges: Sequence[Sequence[int]], matched: list[int | None], seen: set[int]) -> bool:
    """Find a partner for `left`, where partners found before may move to others (H. W. Kuhn's augmenting paths)."""
    for right in edges[left]:
        if right not in seen:
            seen.add(right)
            other = matched[right]
            if other is None or _match(other, edges, matched, seen):
                matched[right] = left
                return True
    return False


def _reached(parts: Sequence[int], whole: int, key: Sequence[Fraction]) -> list[range]:
    """Laid end to end in the order of a key: which wholes each part lies in."""
    reached = [range(0)] * len(parts)
    end = 0
    for index in sorted(range(len(parts)), key=lambda index: key[index]):
        start, end = end, end + parts[index]
        reached[index] = range(start // whole, (end - 1) // whole + 1)
    return reached


@lru_cache(maxsize=BLOCKS_KEPT)
def _layout(phase: Phase, first: int, length: int) -> Layout:
    """A block, by earliest deadline."""
    begin, end = phase.border(first), phase.border(first + length)
    fits = phase.period * (length + 2) < 2**62
    releases, deadlines, sources = [], [], []
    for source, weight in enumerate(phase.weights):
        if begin[source] == end[source]:
            continue
        # Times count from the beginning of the block, and so do samples: the products stay small.
        whole, part = divmod(first * weight, phase.period)
        numbers = np.arange(begin[source] - whole, end[source] - whole + 1)
        times = (numbers if fits else numbers.astype(object)) * phase.period - part
        releases.append(np.maximum((times[:-1] // weight).astype(np.int64), 0))
        deadlines.append(np.minimum(-(-times[1:] // weight).astype(np.int64), length))
        sources.append(np.full(len(numbers) - 1, source))
    release, deadline = np.concatenate(releases), np.concatenate(deadlines)
    assert len(release) == length, f"{len(release)} samples for {length} positions"
    count = len(phase.weights)
    by_release = np.argsort(release, kind="stable")
    until = np.searchsorted(release[by_release], np.arange(length), side="right").tolist()
    keys: list[int] = (deadline * count + np.concatenate(sources))[by_release].tolist()
    laid: list[int] = []
    waiting: list[int] = []
    released = 0
    for position, end_of_released in enumerate(until):
        while released < end_of_released:
            heapq.heappush(waiting, keys[released])
            released += 1
        key = heapq.heappop(waiting)
        assert key >= (position + 1) * count, "a sample came later than it must"
        laid.append(key % count)
    chosen = np.array(laid, np.int16)
    return Layout(chosen, _earlier_alike(chosen, count))


def _earlier_alike(sources: NDArray[np.int16], count: int) -> NDArray[np.int32]:
    """For each position, how many before it have the same source."""
    grouped = np.argsort(sources, kind="stable")
    counts = np.bincount(sources, minlength=count)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    before = np.empty(len(sources), np.int32)
    before[grouped] = np.arange(len(sources)) - starts
    return before


@dataclass(frozen=True)
class Mixed:
    """The order of a mixture: each source goes through its own epochs, as often as its share asks for."""

    schedule: tuple[Phase, ...]
    orders: tuple[Order, ...]  # of each source
    names: tuple[str, ...]

    @property
    def length(self) -> int:
        """Positions in one epoch: as many as there are samples."""
        return sum(order.length for order in self.orders)

    def at(self, positions: NDArray[Any]) -> Indices:
        sources, numbers = sources_at(self.schedule, positions)
        indices = np.empty(numbers.shape, np.int64)
        offset = 0
        for source, order in enumerate(self.orders):
            chosen = sources == source
            if chosen.any():
                indices[chosen] = order.at(numbers[chosen]) + offset
            offset += order.length
        return indices

    def note(self, samples: int) -> str:
        """How often each source is gone through in a run of so many samples."""
        given = given_before(self.schedule, samples)
        parts = [
            f"{count:,} of {name} ({_epochs(count / order.length)})"
            for name, count, order in zip(self.names, given, self.orders, strict=True)
        ]
        return f"a mixture: of {samples:,} samples, {', '.join(parts)}"


def _epochs(count: float) -> str:
    return f"{count:,.1f} epochs" if count >= 10 else f"{count:.2g} epochs"
