"""Columns: arrays in one file that is mapped, not read. Opening a hundred million rows costs what opening ten does.

GRADUSIX   8 bytes
length     8 bytes, little-endian, of the header that follows
header     JSON: for each column its dtype, shape and place in the file, and whatever the writer wants to say
columns    raw, little-endian, each at a multiple of 64 bytes
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from gradus.data.progress import Progress
from gradus.data.shards.storage import flushed
from gradus.schema.errors import GradusError

MAGIC = b"GRADUSIX"
ALIGNED = 64  # a cache line: no element of any dtype lies across two
HASHED_AT_ONCE = 2**22


@dataclass(frozen=True)
class Column:
    """What a column will be, before it is there: the chunks come one after the other."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[NDArray[Any]]

    @classmethod
    def of(cls, array: NDArray[Any]) -> Column:
        return cls(array.dtype.str, array.shape, (array,))


@dataclass(frozen=True)
class Written:
    """What was written: size and digest of the file."""

    bytes: int
    xxh3_64: str


def write_columns(file: Path, columns: Mapping[str, Column], about: Mapping[str, Any]) -> Written:
    """Whole or not at all: the file appears under its name when everything in it is on the disk."""
    places: dict[str, dict[str, Any]] = {}
    at = 0
    for name, column in columns.items():
        places[name] = {"dtype": column.dtype, "shape": list(column.shape), "at": at}
        at = _aligned(at + _size(column.dtype, column.shape))
    header = json.dumps({"columns": places, "about": dict(about)}, separators=(",", ":")).encode()
    header += b" " * (-(len(MAGIC) + 8 + len(header)) % ALIGNED)
    digest = xxhash.xxh3_64()
    written = 0
    with flushed(file) as stream:

        def write(data: Any) -> None:
            nonlocal written
            view = memoryview(data).cast("B")
            stream.write(view)
            digest.update(view)
            written += len(view)

        write(MAGIC + len(header).to_bytes(8, "little") + header)
        for name, column in columns.items():
            begin = written
            for chunk in column.chunks:
                if chunk.size:
                    write(np.ascontiguousarray(chunk, column.dtype))
            size = _size(column.dtype, column.shape)
            assert written - begin == size, f"{file}: column {name} has {written - begin} bytes, announced {size}"
            write(bytes(-size % ALIGNED))
    return Written(written, digest.hexdigest())


class Columns:
    """An open file of columns. It travels to another process as its name, and is mapped there anew."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._open()

    def _open(self) -> None:
        with self.file.open("rb") as stream:
            start = stream.read(len(MAGIC) + 8)
            length = int.from_bytes(start[len(MAGIC) :], "little")
            size = os.fstat(stream.fileno()).st_size
            if len(start) < len(MAGIC) + 8 or start[: len(MAGIC)] != MAGIC or length > size:
                raise _damaged(self.file, "it does not begin as one")
            try:
                header = json.loads(stream.read(length))
                places: dict[str, dict[str, Any]] = header["columns"]
                self.about: dict[str, Any] = header["about"]
            except (ValueError, KeyError, TypeError):
                raise _damaged(self.file, "its header cannot be read") from None
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        first = len(MAGIC) + 8 + length
        self._arrays: dict[str, NDArray[Any]] = {}
        for name, place in places.items():
            dtype, shape, at = np.dtype(place["dtype"]), tuple(place["shape"]), first + place["at"]
            count = int(np.prod(shape, dtype=np.int64))
            if at + count * dtype.itemsize > size:
                raise _damaged(
                    self.file, f"it has {size} bytes, but column {name} ends at {at + count * dtype.itemsize}"
                )
            flat = np.frombuffer(mapped, dtype, count, at) if count else np.empty(0, dtype)
            self._arrays[name] = flat.reshape(shape)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def get(self, name: str) -> NDArray[Any] | None:
        return self._arrays.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.file = state["file"]
        self._open()


def file_digest(file: Path, progress: Progress | None = None) -> Written:
    digest = xxhash.xxh3_64()
    size = 0
    with file.open("rb") as stream:
        while piece := stream.read(HASHED_AT_ONCE):
            digest.update(piece)
            size += len(piece)
            if progress is not None:
                progress.say(f"{file.name}, {size / 1e9:.1f} GB")
    return Written(size, digest.hexdigest())


def smallest_dtype(largest: int) -> str:
    """The unsigned type for offsets and lengths: 4 bytes wherever they do, because there are many."""
    return "<u4" if largest < 2**32 else "<u8"


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def _aligned(at: int) -> int:
    return at + -at % ALIGNED


def _damaged(file: Path, how: str) -> GradusError:
    return GradusError(f"{file} is no whole index of shards: {how}", hint="copy it again, or pack the data again")
