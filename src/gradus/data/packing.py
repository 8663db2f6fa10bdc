"""Packing: documents of any length put together into contexts of one length, planned from their lengths alone.

A document is never cut, unless it is longer than a context: then into whole contexts, and what remains of it. Documents
are taken in an order that the seed shuffles, so that a window of them is not one file, and each window is packed by
best fit, longest first: a document goes where the least room is left that it still fits into. The plan knows nothing of
ranks or workers; a pack is a sample like any other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import Indices, permuted
from gradus.schema.stable_hash import stable_hash

FORMAT = 1  # of a plan; another number makes plans anew
WINDOW = 2**20  # documents that are packed together
# Longest first can lose to documents as they come (4 4 3 3 3 3 into 10: three packs; as 4 3 3 4 3 3: two). Where the
# documents are few, by which such luck is possible, both are tried.
FEW_DOCUMENTS = 4096


@dataclass(frozen=True)
class Packs:
    """Pack p has the pieces first[p] to first[p + 1]: of documents[i], what begins at its token begins[i]."""

    context: int
    tokens: int
    first: Indices
    documents: Indices
    begins: Indices

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def efficiency(self) -> float:
        """How much of all packs is tokens, and not padding."""
        return self.tokens / max(len(self) * self.context, 1)


def packed(lengths: NDArray[np.integer], context: int, seed: int, window: int = WINDOW) -> Packs:
    """The packs of all documents, which have so many tokens each."""
    lengths = np.asarray(lengths, np.int64)
    order = _shuffled("packing", seed, len(lengths))
    numbers, documents, begins, count = [], [], [], 0
    for start in range(0, len(order), window):
        chosen = np.sort(order[start : start + window])
        whole, rest = np.divmod(lengths[chosen], context)
        cut = np.repeat(chosen, whole)
        remaining = rest > 0
        places = _least_packs(rest[remaining], context)
        numbers += [count + np.arange(len(cut)), count + len(cut) + places]
        documents += [cut, chosen[remaining]]
        begins += [context * ranges(np.zeros_like(whole), whole), context * whole[remaining]]
        count += len(cut) + (int(places.max()) + 1 if len(places) else 0)
    return _collected(context, int(lengths.sum()), count, numbers, documents, begins, seed)


def ranges(starts: Indices, lengths: Indices) -> Indices:
    """starts[0], starts[0] + 1, ... (lengths[0] of them), starts[1], ...: many ranges, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.asarray(np.repeat(starts - before, lengths) + np.arange(int(lengths.sum())), np.int64)


def _shuffled(what: str, seed: int, count: int) -> Indices:
    """0 to count - 1 in an order of the seed's; some at a time, because each takes a hundred bytes on the way."""
    shuffled = np.empty(count, np.int64)
    for start in range(0, count, WINDOW):
        some = np.arange(start, min(start + WINDOW, count))
        shuffled[some] = permuted(stable_hash(what, seed), count, some)
    return shuffled


def _collected(
    context: int,
    tokens: int,
    count: int,
    numbers: list[Indices],
    documents: list[Indices],
    begins: list[Indices],
    seed: int,
) -> Packs:
    """The pieces of all windows, by packs; these are shuffled, because full ones come first in a window."""
    if not count:
        nothing = np.zeros(0, np.int64)
        return Packs(context, tokens, np.zeros(1, np.int64), nothing, nothing)
    places = _shuffled("packs", seed, count)[np.concatenate(numbers)]
    by_pack = np.argsort(places, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(places, minlength=count))])
    return Packs(context, tokens, first, np.concatenate(documents)[by_pack], np.concatenate(begins)[by_pack])


def _least_packs(sizes: Indices, room: int) -> Indices:
    """For each document the number of the pack that it goes into."""
    best = _best_fit_decreasing(sizes, room)
    if not len(sizes) or len(sizes) > FEW_DOCUMENTS or best.max() < -(-int(sizes.sum()) // room):
        return best
    first = _first_fit(sizes, room)
    return first if first.max() < best.max() else best


def _best_fit_decreasing(sizes: Indices, room: int) -> Indices:
    """Best fit of the documents from the longest to the shortest.

    Documents of one length are placed together: the pack with the least room that one of them fits into takes as many
    of them as it can, and so do all packs with as much room. So the work grows with the number of different lengths.
    """
    if not len(sizes):
        return sizes
    by_size = np.argsort(-sizes, kind="stable")
    placed = np.empty(len(sizes), np.int64)
    values, starts = np.unique(-sizes[by_size], return_index=True)
    ends = [*starts[1:].tolist(), len(sizes)]
    open_packs: dict[int, list[Indices]] = {}  # by the room that is left in them
    rooms: list[int] = []  # of these, in order
    count = 0

    def leave(packs: Indices, left: int) -> None:
        if left and len(packs):
            if left not in open_packs:
                insort(rooms, left)
            open_packs.setdefault(left, []).append(packs)

    for size, at, end in zip((-values).tolist(), starts.tolist(), ends, strict=True):
        while at < end:
            found = bisect_left(rooms, size)
            if found < len(rooms):
                left = rooms.pop(found)
                packs = np.concatenate(open_packs.pop(left))
            else:
                left = room
                packs = np.arange(count, count + -(-(end - at) // (room // size)))
                count += len(packs)
            each = left // size
            taken = min(end - at, each * len(packs))
            placed[at : at + taken] = np.repeat(packs, each)[:taken]
            filled, more = divmod(taken, each)
            leave(packs[:filled], left - each * size)
            if more:
                leave(packs[filled : filled + 1], left - more * size)
            leave(packs[filled + (more > 0) :], left)
            at += taken
    places = np.empty(len(sizes), np.int64)
    places[by_size] = placed
    return places


def _first_fit(sizes: Indices, room: int) -> Indices:
    """Each document, as they come, into the first pack with room for it."""
    left = np.full(len(sizes), room)
    places = np.empty(len(sizes), np.int64)
    for number, size in enumerate(sizes):
        places[number] = np.argmax(left >= size)
        left[places[number]] -= size
    return places
