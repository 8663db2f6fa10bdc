"""Tar: members as WebDataset reads them, with nothing in their headers that differs from one packing to the next."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import xxhash

BLOCK = 512
END = bytes(2 * BLOCK)  # two empty blocks end an archive
_NAME_BYTES = 100  # what a plain header has room for
_OCTAL_SIZE = 8**11  # and the largest size
_BUFFER_BYTES = 2**20


def _template() -> bytes:
    """A header without name, size and checksum: mode 0444, root, at the beginning of 1970."""
    info = tarfile.TarInfo("")
    info.mode = 0o444
    return info.tobuf(tarfile.GNU_FORMAT)


_HEADER = _template()
# The checksum counts its own eight bytes as spaces.
_SUM = sum(_HEADER[:148]) + 8 * ord(" ") + sum(_HEADER[156:]) - sum(_HEADER[124:135])


def header(name: str, size: int) -> bytes:
    """The block, or blocks for a long name, that come before a member's bytes."""
    encoded = name.encode()
    if len(encoded) > _NAME_BYTES or size >= _OCTAL_SIZE:
        info = tarfile.TarInfo(name)
        info.mode, info.size = 0o444, size
        return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")
    octal = b"%011o" % size
    checksum = b"%06o\0 " % (_SUM + sum(encoded) + sum(octal))
    padded = encoded.ljust(_NAME_BYTES, b"\0")
    return b"".join((padded, _HEADER[100:124], octal, _HEADER[135:148], checksum, _HEADER[156:]))


class Member(NamedTuple):
    suffix: str
    data: bytes


class Shard(NamedTuple):
    """A finished tar file."""

    file: str
    bytes: int
    xxh3_64: str
    samples: int


class ShardWriter:
    """One tar file. Nothing but its bytes: what makes it appear under its name is `close`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        self._stream: IO[bytes] = self._partial.open("wb", buffering=_BUFFER_BYTES)
        self._digest = xxhash.xxh3_64()
        self.bytes = 0
        self.samples = 0

    def add(self, key: str, members: Sequence[Member]) -> list[int]:
        """Write a sample; where the bytes of each member begin."""
        offsets = []
        for suffix, data in members:
            head = header(f"{key}.{suffix}", len(data))
            offsets.append(self.bytes + len(head))
            for piece in (head, data, bytes(-len(data) % BLOCK)):
                self._stream.write(piece)
                self._digest.update(piece)
                self.bytes += len(piece)
        self.samples += 1
        return offsets

    def close(self) -> Shard:
        self._stream.write(END)
        self._digest.update(END)
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._partial.replace(self.file)
        return Shard(self.file.name, self.bytes + len(END), self._digest.hexdigest(), self.samples)

    def abandon(self) -> None:
        """Leave nothing behind."""
        try:
            self._stream.close()
        except OSError:  # what was still in the buffer has no room
            pass
        finally:
            self._partial.unlink(missing_ok=True)


def sample_bytes(key: str, members: Sequence[Member]) -> int:
    """How much longer a shard gets by this sample."""
    return sum(len(header(f"{key}.{m.suffix}", 0)) + len(m.data) + -len(m.data) % BLOCK for m in members)
