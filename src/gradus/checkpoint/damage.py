"""Damage: all that is not as it was written in a checkpoint: which files, and which tensors in them. No torch.

Loading stops at the first byte that is wrong. Who asks what is left of a checkpoint wants to hear of all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from gradus.checkpoint.digest import BLOCK_BYTES, digest
from gradus.checkpoint.manifest import DamagedCheckpoint, read_manifest

MOST_TENSORS = 5  # named of one file
Report = Callable[[int, int | None], None]  # bytes so far, and in all


@dataclass(frozen=True)
class Damage:
    """What is wrong with one file."""

    file: str
    what: str
    tensors: tuple[str, ...] = ()  # that have bytes in what is wrong, as far as it can be told

    def __str__(self) -> str:
        more = f" and {len(self.tensors) - MOST_TENSORS} more" if len(self.tensors) > MOST_TENSORS else ""
        of = f" (of {', '.join(self.tensors[:MOST_TENSORS])}{more})" if self.tensors else ""
        return f"{self.file}: {self.what}{of}"


def damage(path: Path, report: Report | None = None) -> list[Damage]:
    """All that is wrong with a checkpoint, after every byte was read. Nothing: it is whole."""
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        return [Damage(Path(error.details.get("path", path)).name, error.message)]
    files: Mapping[str, Any] = manifest["files"]
    total, before = sum(described["bytes"] for described in files.values()), 0
    found: list[Damage] = []
    for name, described in files.items():
        done = before

        def read(count: int) -> None:
            nonlocal done
            done += count
            if report is not None:
                report(done, total)

        try:
            found += _of_file(path / name, described, list(_ranges(name, manifest)), read)
        except OSError as error:
            found.append(Damage(name, error.strerror or str(error), _tensors_of(name, manifest)))
        before += described["bytes"]
    return found


@dataclass(frozen=True)
class _Range:
    start: int
    stop: int
    digest: str | None  # None: only that of the whole file tells
    of: str  # a tensor's name, or nothing


def _of_file(
    file: Path, described: Mapping[str, Any], ranges: list[_Range], read: Callable[[int], None]
) -> list[Damage]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        if size != described["bytes"]:
            cut_off = tuple(dict.fromkeys(r.of for r in ranges if r.of and r.stop > size))
            return [Damage(file.name, f"found {size} bytes, and {described['bytes']} were written", cut_off)]
        whole, wrong = xxhash.xxh3_64(), []
        room = memoryview(bytearray(BLOCK_BYTES))
        for one in ranges:
            # Headers may be longer than a block.
            block = (
                room[: one.stop - one.start]
                if one.stop - one.start <= BLOCK_BYTES
                else memoryview(bytearray(one.stop - one.start))
            )
            if os.preadv(descriptor, [block], one.start) != len(block):
                raise OSError(f"bytes {one.start} to {one.stop} cannot be read")
            whole.update(block)
            if one.digest is not None and digest(block) != one.digest:
                wrong.append(one)
            read(len(block))
    finally:
        os.close(descriptor)
    if wrong:
        first, last = wrong[0].start, wrong[-1].stop
        tensors = tuple(dict.fromkeys(one.of for one in wrong if one.of))
        where = f"bytes {first} to {last}" if tensors else "its header"
        return [Damage(file.name, f"{where}: not what was written", tensors)]
    if whole.hexdigest() != described["xxh3_64"]:
        return [Damage(file.name, "bytes that belong to no tensor are not what was written")]
    return []


def _ranges(name: str, manifest: Mapping[str, Any]) -> Iterator[_Range]:
    """All of a file, in order, in pieces that have a digest each; and what lies between them."""
    header = manifest["files"][name]["header"]
    known = [_Range(0, header["bytes"], header["xxh3_64"], "")]
    for tensor, entry in manifest["tensors"].items():
        for piece in entry["pieces"]:
            if piece["file"] == name:
                end = piece["start"] + piece["bytes"]
                for number, expected in enumerate(piece["digests"]):
                    start = piece["start"] + number * BLOCK_BYTES
                    known.append(_Range(start, min(start + BLOCK_BYTES, end), expected, tensor))
    position, end = 0, manifest["files"][name]["bytes"]
    for one in [*sorted(known, key=lambda r: r.start), _Range(end, end, None, "")]:
        for start in range(position, one.start, BLOCK_BYTES):
            yield _Range(start, min(start + BLOCK_BYTES, one.start), None, "")
        if one.stop > one.start:
            yield one
        position = one.stop


def _tensors_of(name: str, manifest: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        tensor
        for tensor, entry in manifest["tensors"].items()
        if any(piece["file"] == name for piece in entry["pieces"])
    )
