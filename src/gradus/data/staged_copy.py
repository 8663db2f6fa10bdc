"""A copy of many files on a node's own disk: checked, and completed by whoever comes after a process that was killed.

<copy>/files.jsonl   a line for each file that is whole: size, checksum and time, and since which start of the machine
<copy>/data/…        the files; those that were not wanted here are links to where they came from
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from gradus.data.shards.columns import file_digest
from gradus.record.append_log import read_lines
from gradus.schema.errors import GradusError

DONE = "files.jsonl"
DATA = "data"
BLOCK_BYTES = 4 * 2**20
# Several at a time, since a parallel file system serves many streams faster than one, and each hashes on a core.
MOST_AT_ONCE = 8
TICK_SECONDS = 0.5  # between two looks at whether to give up
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

Report = Callable[[int, int | None], None]  # bytes so far, and in all


class Whole(NamedTuple):
    """A file of the copy as it was when all of it was there."""

    bytes: int
    digest: str
    boot: str  # in which it was written
    mtime_ns: int | None


Recorded = dict[str, Whole]


@dataclass(frozen=True)
class Original:
    """A file to be copied."""

    name: str  # relative to the copy
    bytes: int
    path: str  # where it is now
    xxh3_64: str | None = None  # where that is known
    fetch: Callable[[Path], None] | None = None  # how to get it, if it is no file here


@dataclass(frozen=True)
class Copied:
    """What became of the bytes."""

    copied_bytes: int
    reused_bytes: int
    linked_bytes: int


class GivenUp(Exception):
    """Somebody asked to stop in the middle. What is whole stays."""


class NoRoom(Exception):
    """The disk is full, or a quota is."""


def missing_bytes(copy: Path, originals: Sequence[Original], wanted: Collection[str] | None) -> int:
    """How much room the files that are not there yet will take."""
    whole = _recorded(copy)
    return sum(
        original.bytes
        for original in originals
        if (wanted is None or original.name in wanted) and not _is_there(copy, original, whole)
    )


def complete(
    copy: Path,
    originals: Sequence[Original],
    wanted: Collection[str] | None,
    report: Report,
    give_up: Callable[[], bool],
) -> Copied:
    """Copy what is wanted and not whole yet, and link the rest. One process at a time may do that."""
    data = copy / DATA
    data.mkdir(parents=True, exist_ok=True)
    whole = _recorded(copy)
    chosen = [original for original in originals if wanted is None or original.name in wanted]
    linked = 0
    for original in originals:
        if wanted is not None and original.name not in wanted and not _is_there(copy, original, whole):
            _link(data / original.name, original.path)
            linked += original.bytes
    total = sum(original.bytes for original in chosen)
    work = _Work(copy, whole)
    waiting: set[Future[Done]] = set()
    reused = copied = 0
    with (copy / DONE).open("a") as record, ThreadPoolExecutor(_at_once()) as pool:
        try:
            for finished in _finished(pool, work, iter(chosen), waiting):
                if finished is not None:
                    original, digest, new = finished.result()
                    copied += original.bytes if new else 0
                    reused += 0 if new else original.bytes
                    now = Whole(original.bytes, digest, boot(), (data / original.name).stat().st_mtime_ns)
                    if whole.get(original.name) != now:
                        line = {"file": original.name, "bytes": now.bytes, "xxh3_64": digest, "boot": now.boot}
                        record.write(json.dumps(line | {"mtime_ns": now.mtime_ns}) + "\n")
                        record.flush()
                report(min(reused + work.moved_bytes, total), total)
                if give_up():
                    raise GivenUp
        except BaseException:
            work.stop.set()  # the others leave their files unfinished
            for future in waiting:
                future.cancel()
            raise
    return Copied(copied, reused, linked)


Done = tuple[Original, str, bool]  # what is whole now, its digest, and whether it had to be copied


class _Work:
    """What threads do with each file."""

    def __init__(self, copy: Path, whole: Recorded) -> None:
        self._copy, self._whole = copy, whole
        self._lock = threading.Lock()
        self.moved_bytes = 0
        self.stop = threading.Event()

    def __call__(self, original: Original) -> Done:
        digest = _still_whole(self._copy, original, self._whole)
        if digest is not None:
            return original, digest, False
        return original, self._copied(original, self._copy / DATA / original.name), True

    def _copied(self, original: Original, to: Path) -> str:
        """The file has its name when all of it is there."""
        to.parent.mkdir(parents=True, exist_ok=True)
        partial = to.with_name(f".{to.name}.partial")
        try:
            if original.fetch is not None:
                original.fetch(partial)
                digest = file_digest(partial).xxh3_64
                self._moved(original.bytes)
            else:
                digest = self._copied_bytes(original.path, partial)
            size = partial.stat().st_size
            if size != original.bytes or original.xxh3_64 not in (None, digest):
                raise GradusError(
                    f"{original.path} is not what it should be: {size} bytes with checksum {digest}, expected "
                    f"{original.bytes} bytes{f' with {original.xxh3_64}' if original.xxh3_64 else ''}",
                    hint="it changed while it was copied, or it is damaged: gradus data verify",
                )
            partial.replace(to)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise NoRoom(str(error)) from error
            raise
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        return digest

    def _copied_bytes(self, path: str, partial: Path) -> str:
        digest, buffer = xxhash.xxh3_64(), bytearray(BLOCK_BYTES)
        view = memoryview(buffer)
        with open(path, "rb", buffering=0) as source, open(partial, "wb", buffering=0) as target:
            while count := source.readinto(buffer):
                if self.stop.is_set():
                    raise GivenUp
                digest.update(view[:count])
                written = 0
                while written < count:
                    written += target.write(view[written:count])
                self._moved(count)
        return digest.hexdigest()

    def _moved(self, count: int) -> None:
        with self._lock:
            self.moved_bytes += count


def _finished(
    pool: ThreadPoolExecutor, work: _Work, left: Iterator[Original], waiting: set[Future[Done]]
) -> Iterator[Future[Done] | None]:
    """Those that are done, as they come, and None now and then. Few wait, because there may be millions of files."""
    while True:
        while len(waiting) < 2 * MOST_AT_ONCE and (following := next(left, None)) is not None:
            waiting.add(pool.submit(work, following))
        if not waiting:
            return
        finished, _ = wait(waiting, timeout=TICK_SECONDS, return_when=FIRST_COMPLETED)
        for future in finished:
            waiting.discard(future)
            yield future
        if not finished:
            yield None


def _link(at: Path, to: str) -> None:
    """In place of a file that stays where it is."""
    if at.is_symlink() and os.readlink(at) == to:
        return
    at.parent.mkdir(parents=True, exist_ok=True)
    beside = at.with_name(f".{at.name}.link")
    beside.unlink(missing_ok=True)
    beside.symlink_to(to)
    beside.replace(at)


def _recorded(copy: Path) -> Recorded:
    """The files that were whole once, as far as that was written down."""
    found: Recorded = {}
    for line in read_lines(copy / DONE).records:
        name, size, digest = line.get("file"), line.get("bytes"), line.get("xxh3_64")
        if isinstance(name, str) and isinstance(size, int) and isinstance(digest, str):
            changed = line.get("mtime_ns")
            found[name] = Whole(size, digest, str(line.get("boot")), changed if isinstance(changed, int) else None)
    return found


def _is_there(copy: Path, original: Original, whole: Recorded) -> bool:
    file = copy / DATA / original.name
    recorded = whole.get(original.name)
    if recorded is None or recorded.bytes != original.bytes or file.is_symlink():
        return False
    try:
        return file.stat().st_size == original.bytes
    except OSError:
        return False


def _still_whole(copy: Path, original: Original, whole: Recorded) -> str | None:
    """The digest of a file that need not be copied again.

    A process that is killed takes nothing with it that was written; a machine that goes down may, and then every byte
    is compared. So it is where somebody wrote to the file since.
    """
    if not _is_there(copy, original, whole):
        return None
    file, known = copy / DATA / original.name, whole[original.name]
    if original.xxh3_64 not in (None, known.digest):
        return None
    untouched = known.boot == boot() and file.stat().st_mtime_ns == known.mtime_ns
    return known.digest if untouched or file_digest(file).xxh3_64 == known.digest else None


def boot() -> str:
    """Which start of this machine this is."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _at_once() -> int:
    return max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0))))
