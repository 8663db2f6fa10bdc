"""The index: for each sample its key and, for each part, place, length and checksum, in columns that are mapped.

offsets    [samples, parts]   where in its shard the part's bytes begin; 0: the sample has no such part
lengths    [samples, parts]   bytes
checksums  [samples, parts]   xxh3_64 of those bytes
suffixes   [samples, parts]   which of the part's suffixes the member has
labels     [samples]          class numbers, -1 where there is none
text_bytes [samples]          of a text, as UTF-8
tokens     [samples + 1]      how many tokens come before this sample's
keys, key_ends                the keys one after the other, and where each of them ends
shards     [shards + 1]       the first sample of each shard
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import Indices
from gradus.data.shards.columns import Column, Columns, Written, smallest_dtype, write_columns
from gradus.data.shards.tar import Shard

MISSING = 0  # no member begins at the first byte of a tar file
TABLES = ("offsets", "lengths", "checksums", "suffixes")


class Entry(NamedTuple):
    """A member of a shard."""

    suffix: str
    offset: int
    length: int
    checksum: int


class Fragment:
    """The index of one unit of packing, as it grows; later a part of the whole index."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, int]] = {}  # name → suffixes with their numbers, in order of appearance
        # One row for each member: sample, part, and then what the tables say.
        self._members = {name: array("Q") for name in ("samples", "parts", *TABLES)}
        self._samples = {name: array("q") for name in ("labels", "text_bytes", "tokens", "key_lengths")}
        self._keys = bytearray()

    def __len__(self) -> int:
        return len(self._samples["labels"])

    def add(self, key: str, entries: Mapping[str, Entry], label: int | None, text_bytes: int, tokens: int) -> None:
        number = len(self)
        for part, (suffix, *place) in entries.items():
            suffixes = self.parts.setdefault(part, {})
            values = (number, list(self.parts).index(part), *place, suffixes.setdefault(suffix, len(suffixes)))
            for column, value in zip(self._members.values(), values, strict=True):
                column.append(value)
        encoded = key.encode()
        self._keys += encoded
        values = (-1 if label is None else label, text_bytes, tokens, len(encoded))
        for column, value in zip(self._samples.values(), values, strict=True):
            column.append(value)

    def write(self, file: Path, shards: Sequence[Shard], about: Mapping[str, Any]) -> None:
        members = {name: np.array(column, np.uint64) for name, column in self._members.items()}
        where = members["samples"].astype(np.int64), members["parts"].astype(np.int64)
        arrays: dict[str, NDArray[Any]] = {name: np.array(column, np.int64) for name, column in self._samples.items()}
        for name in TABLES:
            arrays[name] = np.zeros((len(self), len(self.parts)), np.uint64)
            arrays[name][where] = members[name]
        arrays["keys"] = np.frombuffer(bytes(self._keys), np.uint8)
        parts = {name: list(suffixes) for name, suffixes in self.parts.items()}
        document = {**about, "parts": parts, "shards": [shard._asdict() for shard in shards], "samples": len(self)}
        write_columns(file, {name: Column.of(array) for name, array in arrays.items()}, document)


def merged_parts(fragments: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """All parts and their suffixes, in the order in which the units of packing met them."""
    parts: dict[str, list[str]] = {}
    for about in fragments:
        for name, suffixes in about["parts"].items():
            known = parts.setdefault(name, [])
            known += [suffix for suffix in suffixes if suffix not in known]
    return parts


def write_index(file: Path, fragments: Sequence[Path], parts: Mapping[str, list[str]]) -> Written:
    """The fragments as one index, a column at a time, so that memory is needed for one fragment only."""
    abouts = [Columns(fragment).about for fragment in fragments]
    count = sum(each["samples"] for each in abouts)
    shards = [shard["samples"] for each in abouts for shard in each["shards"]]

    def chunks(change: Callable[[Columns], NDArray[Any]]) -> Iterator[NDArray[Any]]:
        for fragment in fragments:
            yield change(Columns(fragment))

    def largest(name: str) -> int:
        return max((int(chunk.max(initial=0)) for chunk in chunks(lambda found: found[name])), default=0)

    def spread(name: str) -> Callable[[Columns], NDArray[Any]]:
        """A table of a fragment with the columns of the whole index."""

        def change(found: Columns) -> NDArray[Any]:
            whole = np.zeros((found.about["samples"], len(parts)), np.uint64)
            for column, (part, suffixes) in enumerate(found.about["parts"].items()):
                values = found[name][:, column]
                if name == "suffixes":
                    numbers = np.array([parts[part].index(suffix) for suffix in suffixes], np.uint64)
                    values = np.where(found["offsets"][:, column] == MISSING, 0, numbers[values])
                whole[:, list(parts).index(part)] = values
            return whole

        return change

    def summed(name: str, first: bool) -> Iterator[NDArray[Any]]:
        """Running sums, with the zero before the first or without it."""
        before = 0
        if first:
            yield np.zeros(1, np.int64)
        for chunk in chunks(lambda found: found[name]):
            sums = before + np.cumsum(chunk, dtype=np.int64)
            before = int(sums[-1]) if len(sums) else before
            yield sums

    table = (count, len(parts))
    key_bytes = sum(len(chunk) for chunk in chunks(lambda found: found["keys"]))
    columns = {
        "shards": Column.of(np.concatenate([[0], np.cumsum(shards, dtype=np.int64)]).astype(np.int64)),
        "offsets": Column(smallest_dtype(largest("offsets")), table, chunks(spread("offsets"))),
        "lengths": Column(smallest_dtype(largest("lengths")), table, chunks(spread("lengths"))),
        "checksums": Column("<u8", table, chunks(spread("checksums"))),
        "suffixes": Column("|u1", table, chunks(spread("suffixes"))),
        "key_ends": Column(smallest_dtype(key_bytes), (count,), summed("key_lengths", first=False)),
        "keys": Column("|u1", (key_bytes,), chunks(lambda found: found["keys"])),
    }
    if any(chunk.max(initial=-1) >= 0 for chunk in chunks(lambda found: found["labels"])):
        columns["labels"] = Column("<i8", (count,), chunks(lambda found: found["labels"]))
    if largest("text_bytes"):
        columns["text_bytes"] = Column(
            smallest_dtype(largest("text_bytes")), (count,), chunks(lambda found: found["text_bytes"])
        )
    if largest("tokens"):
        columns["tokens"] = Column("<i8", (count + 1,), summed("tokens", first=True))
    return write_columns(file, columns, {})


@dataclass(frozen=True)
class Places:
    """Where one part of some samples lies: the number of the shard, and bytes in it."""

    shards: list[int]
    offsets: list[int]
    lengths: list[int]


class Index:
    """The index of a dataset."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._columns = Columns(file)
        self._shards = self._columns["shards"]
        self.offsets = self._columns["offsets"]
        self.lengths = self._columns["lengths"]
        self.checksums = self._columns["checksums"]
        self.suffixes = self._columns["suffixes"]
        self.labels = self._columns.get("labels")
        self.text_bytes = self._columns.get("text_bytes")
        self.tokens = self._columns.get("tokens")
        self.length = len(self.offsets)

    def places(self, numbers: Indices, part: int) -> Places:
        """Of many samples at once: a look-up for each of them would take longer than the read."""
        shards = np.searchsorted(self._shards, numbers, side="right") - 1
        return Places(shards.tolist(), self.offsets[numbers, part].tolist(), self.lengths[numbers, part].tolist())

    def shard_of(self, number: int) -> int:
        return int(np.searchsorted(self._shards, number, side="right")) - 1

    def samples_of(self, shard: int) -> tuple[int, int]:
        """The first sample of a shard, and the one after its last."""
        return int(self._shards[shard]), int(self._shards[shard + 1])

    def key(self, number: int) -> str:
        ends, keys = self._columns["key_ends"], self._columns["keys"]
        begin = int(ends[number - 1]) if number else 0
        return keys[begin : int(ends[number])].tobytes().decode()

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["file"])  # type: ignore[misc]
