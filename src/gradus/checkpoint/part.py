"""Part: the file that one rank writes of a checkpoint, and the record of what it wrote. No torch.

part-00003-of-00004.safetensors   the boxes of tensors that this rank writes, under their tensors' names
part-00003-of-00004.json          until the checkpoint is committed: what is in it, with digests
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from gradus.checkpoint.digest import BLOCK_BYTES, digest
from gradus.checkpoint.tensor_file import ITEM_BYTES
from gradus.record.durable import flush

if TYPE_CHECKING:
    from typing_extensions import Buffer

COMMITTED = "COMMITTED"
_ALIGNMENT = 8  # of the tensors' bytes in the file
_PARTIAL = ".partial"


class Abandoned(Exception):
    """Whoever asked for this checkpoint does not want it any more."""


@dataclass(frozen=True)
class Entry:
    """A box of a tensor, and where in the file its bytes lie."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # where in the whole the box begins
    box: tuple[int, ...]  # the box's own shape
    start: int  # from the beginning of the file
    byte_count: int

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Where the blocks that have a digest each begin and end in the file. Of nothing there is none."""
        end = self.start + self.byte_count
        for start in range(self.start, end, BLOCK_BYTES):
            yield start, min(start + BLOCK_BYTES, end)


Boxes = Iterable[tuple[str, str, Sequence[int], Sequence[int], Sequence[int]]]  # name, dtype, shape, offset, box


@dataclass(frozen=True)
class PartLayout:
    """A file before it is written: its header, and where each box goes."""

    file_name: str
    header: bytes  # with the eight bytes of its length before it
    entries: tuple[Entry, ...]
    total_bytes: int

    def blocks(self) -> Iterator[tuple[int, int]]:
        """All of the file in order: the header, then the blocks of each entry."""
        yield 0, len(self.header)
        for entry in self.entries:
            yield from entry.blocks()

    def to_document(self) -> dict[str, Any]:
        boxes = [[e.name, e.dtype, e.shape, e.offset, e.box] for e in self.entries]
        return {"file_name": self.file_name, "boxes": boxes}

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> PartLayout:
        return lay_out(document["file_name"], document["boxes"])


def part_name(rank: int, ranks: int) -> str:
    return f"part-{rank:05d}-of-{ranks:05d}.safetensors"


def record_name(rank: int, ranks: int) -> str:
    return f"part-{rank:05d}-of-{ranks:05d}.json"


def lay_out(file_name: str, boxes: Boxes) -> PartLayout:
    """Where everything goes in a file that any safetensors reader takes; the same boxes always give the same file."""
    # The widest types first, so that all lie aligned.
    ordered = sorted(boxes, key=lambda box: (-ITEM_BYTES[box[1]], box[0]))
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, _, _, box in ordered:
        end = position + math.prod(box) * ITEM_BYTES[dtype]
        assert name not in described, f"{name} twice in one file"
        described[name] = {"dtype": dtype, "shape": list(box), "data_offsets": [position, end]}
        position = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    entries = []
    for name, dtype, shape, offset, box in ordered:
        begin, end = described[name]["data_offsets"]
        places = (tuple(shape), tuple(offset), tuple(box))
        entries.append(Entry(name, dtype, *places, start=len(header) + begin, byte_count=end - begin))
    return PartLayout(file_name, header, tuple(entries), len(header) + position)


@dataclass(frozen=True)
class PartRecord:
    """A file as it was written: its size and digest, those of its header, and of each block of each tensor."""

    file_name: str
    bytes: int
    xxh3_64: str
    header_bytes: int
    header_xxh3_64: str
    tensors: tuple[tuple[Entry, tuple[str, ...]], ...]
    save_id: str = ""  # of which save: a record that an earlier one left in the same folder is not of this one
    held: tuple[str, ...] = ()  # all tensors that the rank has, whoever writes them

    @property
    def name(self) -> str:
        return self.file_name.removesuffix(".safetensors") + ".json"

    def to_document(self) -> dict[str, Any]:
        tensors = [
            [e.name, e.dtype, e.shape, e.offset, e.box, e.start, e.byte_count, digests] for e, digests in self.tensors
        ]
        return {**{key: getattr(self, key) for key in _PLAIN}, "held": self.held, "tensors": tensors}

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> PartRecord:
        tensors = []
        for name, dtype, shape, offset, box, start, byte_count, digests in document["tensors"]:
            entry = Entry(name, dtype, tuple(shape), tuple(offset), tuple(box), start, byte_count)
            tensors.append((entry, tuple(digests)))
        plain = {key: document[key] for key in _PLAIN}
        return PartRecord(**plain, tensors=tuple(tensors), held=tuple(document["held"]))


_PLAIN = ("file_name", "bytes", "xxh3_64", "header_bytes", "header_xxh3_64", "save_id")


def write_part(
    folder: Path,
    layout: PartLayout,
    data: Callable[[int, int], Buffer],
    *,
    abandoned: Callable[[], bool],
    save_id: str = "",
    held: Sequence[str] = (),
) -> PartRecord:
    """Write a rank's file; the record says what the disk gave back of it.

    `data` is asked for the bytes from one place of the file to another, in ascending order and never for the header.
    A failure is an OSError and leaves nothing of the file, and what was committed in the folder before is no longer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / layout.file_name
    # First: what comes into the folder now is another checkpoint than the one that was committed there.
    for name in (COMMITTED, file.with_suffix(".json").name):
        (folder / name).unlink(missing_ok=True)
    summed, digests = write_file(file, layout, data, abandoned=abandoned)
    by_entry, rest = [], iter(digests[1:])
    for entry in layout.entries:
        by_entry.append((entry, tuple(next(rest) for _ in entry.blocks())))
    sizes = (layout.total_bytes, summed, len(layout.header), digests[0])
    return PartRecord(layout.file_name, *sizes, tuple(by_entry), save_id, tuple(held))


def write_file(
    file: Path, layout: PartLayout, data: Callable[[int, int], Buffer], *, abandoned: Callable[[], bool]
) -> tuple[str, list[str]]:
    """Write a file, flush it to the disk, read it back, and only then give it its name.

    Returned are the digest of the whole, and that of each block.
    """
    partial = file.with_name(file.name + _PARTIAL)
    try:
        summed, digests = _written(partial, layout, data, abandoned)
        _read_back(partial, layout, digests, abandoned)
        os.replace(partial, file)
    except BaseException:
        _forget(partial)
        raise
    return summed, digests


def _written(
    partial: Path, layout: PartLayout, data: Callable[[int, int], Buffer], abandoned: Callable[[], bool]
) -> tuple[str, list[str]]:
    """The digest of the whole file, and that of each block."""
    summed, digests = xxhash.xxh3_64(), []
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for start, stop in layout.blocks():
            if abandoned():
                raise Abandoned
            block = memoryview(layout.header if start == 0 else data(start, stop)).cast("B")
            assert len(block) == stop - start, f"{len(block)} bytes for {start} to {stop}"
            digests.append(digest(block))
            summed.update(block)
            write_exactly(descriptor, block, start)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return summed.hexdigest(), digests


def write_exactly(descriptor: int, block: memoryview, start: int) -> None:
    while block:
        count = os.pwrite(descriptor, block, start)
        block, start = block[count:], start + count


def _read_back(partial: Path, layout: PartLayout, digests: Sequence[str], abandoned: Callable[[], bool]) -> None:
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        if size != layout.total_bytes:
            raise OSError(f"{partial} has {size} bytes, and {layout.total_bytes} were written")
        # Or else it would be the system's own memory that is compared.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        room = memoryview(bytearray(max(stop - start for start, stop in layout.blocks())))
        for (start, stop), expected in zip(layout.blocks(), digests, strict=True):
            if abandoned():
                raise Abandoned
            block = room[: stop - start]
            if os.preadv(descriptor, [block], start) != len(block) or digest(block) != expected:
                raise OSError(f"{partial}: bytes {start} to {stop} are not those that were written")
    finally:
        os.close(descriptor)


def write_record(folder: Path, record: PartRecord) -> None:
    """Say that this rank's part is there."""
    write_whole(folder / record.name, json.dumps(record.to_document(), separators=(",", ":")).encode())
    flush(folder)


def read_record(folder: Path, rank: int, ranks: int) -> PartRecord | None:
    """The record of a rank, if it is there yet."""
    try:
        text = (folder / record_name(rank, ranks)).read_text()
    except FileNotFoundError:
        return None
    try:
        return PartRecord.from_document(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{folder / record_name(rank, ranks)} is not a record: {error!r}") from error


def write_whole(file: Path, content: bytes) -> None:
    """A small file that is there as a whole or not at all, and on the disk."""
    partial = file.with_name(file.name + _PARTIAL)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_exactly(descriptor, memoryview(content), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if partial.read_bytes() != content:
            raise OSError(f"{partial}: its bytes are not those that were written")
        os.replace(partial, file)
    except BaseException:
        _forget(partial)
        raise


def _forget(partial: Path) -> None:
    """What could not be written is in nobody's way; the error that is being told is the one that counts."""
    with suppress(OSError):
        partial.unlink(missing_ok=True)
