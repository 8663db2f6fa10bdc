"""Reading files as training does, with an empty page cache as far as the system lets one have it."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK = 4 << 20  # what is read or written at once when all of a file is
_FSTYPES_WITHOUT_A_DISK = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Read:
    """So many pieces and bytes in so many seconds."""

    pieces: int
    bytes: int
    seconds: float

    @property
    def megabytes_per_second(self) -> float:
        return self.bytes / max(self.seconds, 1e-9) / 1e6

    @property
    def pieces_per_second(self) -> float:
        return self.pieces / max(self.seconds, 1e-9)


def written(path: Path, size: int) -> Read:
    """Write a file that cannot be compressed, until it is on the disk."""
    noise = os.urandom(min(BLOCK, size) + 4096)
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for number, start in enumerate(range(0, size, BLOCK)):
            shift = number * 97 % 4096  # so that no two blocks are alike
            file.write(memoryview(noise)[shift : shift + min(BLOCK, size - start)])
        os.fsync(file.fileno())
    return Read(1, size, time.perf_counter() - begun)


def drop(paths: Iterable[Path]) -> None:
    """Ask the system to forget what it holds of these files. They must be on the disk already."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def held_share(path: Path) -> float | None:
    """The share of a file that is in memory; None where the system does not say."""
    size = path.stat().st_size
    if not size:
        return 0.0
    pages = -(-size // mmap.PAGESIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        here = ctypes.c_char.from_buffer(mapped)
        try:
            found = (ctypes.c_ubyte * pages)()
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.mincore(ctypes.c_void_p(ctypes.addressof(here)), ctypes.c_size_t(size), found) != 0:
                return None
            return sum(page & 1 for page in found) / pages
        finally:
            del here  # or the mapping cannot be closed


def read_through(path: Path) -> Read:
    """All of a file, from its beginning to its end."""
    total, buffer = 0, bytearray(BLOCK)
    begun = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            total += count
    return Read(1, total, time.perf_counter() - begun)


def read_pieces(path: Path, piece: int, most: int, seconds: float, seed: int) -> Read:
    """Pieces of a file in random order, none twice, until there are enough or the time is over."""
    starts = list(range(0, path.stat().st_size - piece + 1, piece))
    random.Random(seed).shuffle(starts)
    total = pieces = 0
    begun = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # without it, the system reads ahead
        for start in starts[:most]:
            total += len(os.pread(file.fileno(), piece, start))
            pieces += 1
            if time.perf_counter() - begun > seconds:
                break
    return Read(pieces, total, time.perf_counter() - begun)


def read_files(paths: Sequence[Path], seconds: float, seed: int) -> Read:
    """Whole small files in random order: opened, read and closed one by one."""
    order = list(paths)
    random.Random(seed).shuffle(order)
    total = pieces = 0
    begun = time.perf_counter()
    for path in order:
        with path.open("rb", buffering=0) as file:
            total += len(file.read())
        pieces += 1
        if time.perf_counter() - begun > seconds:
            break
    return Read(pieces, total, time.perf_counter() - begun)


def file_system(path: Path) -> str | None:
    """What kind of file system a path is on, as /proc/mounts calls it."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return None
    best, kind = -1, None
    resolved = path.resolve()
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mounted = Path(fields[1].replace("\\040", " "))
        if resolved.is_relative_to(mounted) and len(mounted.parts) >= best:
            best, kind = len(mounted.parts), fields[2]
    return kind


def is_memory(kind: str | None) -> bool:
    """Whether a file system has no disk behind it."""
    return kind in _FSTYPES_WITHOUT_A_DISK
