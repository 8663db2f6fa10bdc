"""Reading: any part of any sample, by one read at a place that the index knows. No tar file is ever walked through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from gradus.data.order import Indices
from gradus.data.shards.columns import file_digest
from gradus.data.shards.description import INDEX, read_description
from gradus.data.shards.index import MISSING, Index
from gradus.data.shards.storage import Storage
from gradus.data.token_cache import cache_folder, cached
from gradus.schema.errors import GradusError

# An index up to this size is checked whenever it is opened: 64 MiB took 10 ms of one core (AMD EPYC, in the page cache,
# November 2026), so this is below a second. About 100 million pictures have one so large; a larger one is for
# `gradus data verify`.
CHECKED_BYTES = 4 * 2**30
# A part above this size is compared with its checksum once by each process, so that a window of a long text costs what
# is in the window.
LONG_BYTES = 2**16


class DamagedSample(GradusError):
    """Bytes of a shard that are not those that were packed."""

    kind = "damaged-data"


class Shards:
    """A packed dataset, open for reading. It travels to a loader's worker as its address, and is opened there anew."""

    def __init__(self, path: str, *, verify: bool = True, cache: str | None = None) -> None:
        self.storage = Storage(path)
        self.verify = verify
        self.description = read_description(self.storage)
        self.index = Index(self._index_file(cache))
        assert self.index.length == self.description.length, f"{path}: {self.index.length} samples in the index"
        self._compared: set[tuple[int, int]] = set()  # long parts that are as they were packed
        self._names = [shard.file for shard in self.description.shards]

    def _index_file(self, cache: str | None) -> Path:
        """The index as a file that can be mapped: of data that is far away, a copy in the cache."""
        wanted = self.description.index
        if self.storage.remote:

            def copy(folder: Path) -> dict[str, Any]:
                self.storage.copy(INDEX, folder / INDEX)
                return {"path": self.storage.folder}

            file = cached(cache_folder(cache), f"index-{wanted.xxh3_64}", copy) / INDEX
        else:
            file = Path(self.storage.folder) / INDEX
        size = file.stat().st_size if file.is_file() else 0
        if size != wanted.bytes or (size <= CHECKED_BYTES and file_digest(file).xxh3_64 != wanted.xxh3_64):
            message = f"{file} is not the index of {self.storage.folder}: it has {size} bytes, expected {wanted.bytes}"
            if size == wanted.bytes:
                message = f"{file} is not as it was written: its checksum is not {wanted.xxh3_64}"
            raise GradusError(message, hint="copy it again, or pack the data again")
        return file

    def __len__(self) -> int:
        return self.index.length

    def read(self, numbers: Indices, part: int) -> list[bytes]:
        """One part of these samples."""
        places = self.index.places(numbers, part)
        if MISSING in places.offsets:
            number = int(numbers[places.offsets.index(MISSING)])
            name = self.description.parts[part].name
            raise GradusError(
                f"{self.name(number)} has no part {name!r}",
                hint="not all samples of this dataset have it; pack only those that do",
            )
        names = [self._names[shard] for shard in places.shards]
        found = self.storage.open_ranges(names, places.offsets, places.lengths)
        if self.verify:
            for number, data in zip(numbers.tolist(), found, strict=True):
                self.check(number, part, data)
        return found

    def read_span(self, shard: int, start: int, end: int) -> bytes:
        """Bytes of a shard that may belong to several samples which follow each other."""
        return self.storage.open_range(self._names[shard], start, end - start)

    def compares(self, number: int, part: int) -> bool:
        """Whether what is read of this part is to be all of it, for `check`."""
        return self.verify and (number, part) not in self._compared

    def check(self, number: int, part: int, data: bytes | memoryview) -> None:
        wanted = int(self.index.checksums[number, part])
        found = xxhash.xxh3_64_intdigest(data)
        if found != wanted:
            name = self.description.parts[part].name
            raise DamagedSample(
                f"{self.name(number)}, part {name!r}: its checksum is {found:016x}, packed was {wanted:016x}",
                hint=f"all damage: gradus data verify {self.storage.folder}",
                shard=self._names[self.index.shard_of(number)],
                sample=self.index.key(number),
                part=name,
            )
        if len(data) > LONG_BYTES:
            self._compared.add((number, part))

    def suffix(self, number: int, part: int) -> str:
        return self.description.parts[part].suffixes[int(self.index.suffixes[number, part])]

    def name(self, number: int) -> str:
        """A sample as it is named in an error."""
        shard = self._names[self.index.shard_of(number)]
        return f"{self.storage.folder}/{shard}, sample {self.index.key(number)!r} (number {number})"
