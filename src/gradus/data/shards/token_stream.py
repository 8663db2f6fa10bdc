"""A stream of tokens: the documents of a dataset as one long array, of which only what is asked for is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import Indices
from gradus.data.shards.description import TOKENS
from gradus.data.shards.reading import Shards
from gradus.schema.errors import InputError

Tokens = NDArray[Any]


class TokenStream:
    """Document i is self[starts[i]:starts[i + 1]]; it is sample first + i of the shards, or numbers[i]."""

    def __init__(self, shards: Shards, first: int, count: int, numbers: Indices | None = None) -> None:
        about, part = shards.description.tokens, shards.description.part(TOKENS)
        assert about is not None, shards.storage.folder
        assert part is not None, shards.storage.folder
        assert shards.index.tokens is not None, shards.storage.folder
        self._shards, self._part = shards, part
        self._first, self._numbers = first, numbers
        self._vocabulary = about.vocabulary
        self.dtype = np.dtype(about.dtype)
        self.documents = count if numbers is None else len(numbers)
        before = shards.index.tokens
        if numbers is None:  # as they lie: nothing has to be added up
            self._base = int(before[first])
            self._starts = before[first : first + count + 1]
        else:
            self._base = 0
            lengths = before[numbers + 1] - before[numbers]
            self._starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1]) - self._base

    @property
    def document_lengths(self) -> Indices:
        return np.diff(self._starts)

    @property
    def starts(self) -> Indices:
        """Where each document begins, and the end."""
        return self._starts - self._base if self._base else self._starts

    def __getitem__(self, places: Indices) -> Tokens:
        """Tokens at any places. Places that follow each other are read together."""
        flat = np.asarray(places).reshape(-1)
        if not flat.size:
            return np.empty(np.shape(places), self.dtype)
        begins = np.concatenate([[0], np.flatnonzero(np.diff(flat) != 1) + 1])
        lengths = np.diff(np.append(begins, flat.size))
        return self.runs(flat[begins], lengths).reshape(np.shape(places))

    def runs(self, starts: Indices, lengths: Indices) -> Tokens:
        """Stretches of the stream, one after the other."""
        found = np.empty(int(lengths.sum()), self.dtype)
        starts = starts + self._base
        firsts = np.searchsorted(self._starts, starts, side="right") - 1
        lasts = np.searchsorted(self._starts, starts + lengths - 1, side="right") - 1
        at = 0
        for start, length, first, last in zip(
            starts.tolist(), lengths.tolist(), firsts.tolist(), lasts.tolist(), strict=True
        ):
            if length:
                self._fill(found[at : at + length], start, first, last)
            at += length
        largest = int(found.max(initial=0))
        if largest >= self._vocabulary:
            message = (
                f"data.path: {self._shards.storage.folder} has token {largest}, its vocabulary is {self._vocabulary}"
            )
            raise InputError(message, field="data.path", found=largest, allowed=f"less than {self._vocabulary}")
        return found

    def _fill(self, target: Tokens, start: int, first: int, last: int) -> None:
        """The stretch that begins at a place in document `first` and ends in document `last`."""
        shards, part, width = self._shards, self._part, self.dtype.itemsize
        documents = np.arange(first, last + 1)
        numbers = documents + self._first if self._numbers is None else self._numbers[documents]
        places = shards.index.places(numbers, part)
        done, skip = 0, start - int(self._starts[first])
        row = 0
        while row < len(numbers):
            # Neighbours in a shard are one read, with the headers between them, which are small.
            stop = row + 1
            while (
                stop < len(numbers)
                and places.shards[stop] == places.shards[row]
                and numbers[stop] == numbers[stop - 1] + 1
            ):
                stop += 1
            compares = [shards.compares(int(number), part) for number in numbers[row:stop]]
            begin = places.offsets[row] + (0 if compares[0] else skip * width)
            wanted_last = len(target) - done - sum(places.lengths[row : stop - 1]) // width + skip
            end = places.offsets[stop - 1] + (
                places.lengths[stop - 1] if compares[-1] else min(places.lengths[stop - 1], wanted_last * width)
            )
            span = memoryview(shards.read_span(places.shards[row], begin, end))
            for each in range(row, stop):
                offset = places.offsets[each] - begin
                if compares[each - row]:
                    shards.check(int(numbers[each]), part, span[offset : offset + places.lengths[each]])
                count = min(places.lengths[each] // width - skip, len(target) - done)
                tokens = np.frombuffer(span, self.dtype, count, offset + skip * width)
                target[done : done + count] = tokens
                done, skip = done + count, 0
            row = stop
        assert done == len(target), f"{done} of {len(target)} tokens"
