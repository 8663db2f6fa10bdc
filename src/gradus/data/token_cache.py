"""The token cache: a folder for each thing that takes long to make, made once, by one process, and whole or not at all.

It may lie on a shared file system, and many ranks and runs may want the same entry at the same moment. Whoever creates
the lock file builds, in a folder of its own; a rename makes the entry appear at once with everything in it. The lock of
a builder that has died is taken over. Should two build after all, the second finds the entry there and throws its own
away.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradus.data.progress import Progress
from gradus.data.shards.columns import file_digest
from gradus.record.durable import flush
from gradus.schema.errors import GradusError, InputError

META = "meta.json"
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 180.0  # a lock that nobody has touched for so long is nobody's; NFS shows a touch up to 60 s late
POLL_SECONDS = (0.2, 2.0)  # at first, and after a while: thousands of ranks may look at one folder

Build = Callable[[Path], dict[str, Any]]  # fills a folder, and returns what `meta.json` shall say


def cache_folder(given: str | None) -> Path:
    """`data.cache`, else GRADUS_CACHE, else where caches of this user are."""
    if given is not None:
        return Path(given)
    if os.environ.get("GRADUS_CACHE"):
        return Path(os.environ["GRADUS_CACHE"]) / "tokens"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "gradus" / "tokens"


def key_of(description: Any) -> str:
    """A name for what a description describes."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:24]


def cached(folder: Path, key: str, build: Build) -> Path:
    """The folder of the entry, built now if it is not there yet."""
    entry = folder / key
    told, pause = False, POLL_SECONDS[0]
    while not is_whole(entry):
        with _lock(folder, key) as mine:
            if mine and not is_whole(entry):
                _build(folder, key, build)
        if not mine:
            if not told:
                print(f"waiting for another process that prepares {entry}", file=sys.stderr, flush=True)
                told = True
            time.sleep(pause)
            pause = min(1.3 * pause, POLL_SECONDS[1])
    return entry


def is_whole(entry: Path) -> bool:
    return (entry / META).is_file()


def meta_of(entry: Path) -> dict[str, Any]:
    """What is known about an entry; refused if its files are not as long as they were written."""
    meta: dict[str, Any] = json.loads((entry / META).read_text())
    for name, size in meta["files"].items():
        file = entry / name
        found = file.stat().st_size if file.is_file() else 0
        if found != size:
            raise GradusError(f"{file} has {found} bytes, expected {size}", hint=f"delete {entry}; it is made again")
    return meta


class DamagedEntry(GradusError):
    """Bytes in the cache that are not those that were written."""

    kind = "damaged-data"


def check_content(entry: Path) -> None:
    """Every byte of an entry against the digests of its files.

    For a launcher, once before ranks open it: they all map the same files, and of a large one each would read it all.
    """
    progress = Progress(f"checking {entry}")
    for name, wanted in meta_of(entry).get("digests", {}).items():  # entries of earlier versions have none
        found = file_digest(entry / name, progress).xxh3_64
        if found != wanted:
            message = f"{entry / name} is not as it was written: its checksum is {found}, expected {wanted}"
            raise DamagedEntry(message, hint=f"delete {entry}; it is made again")


def _build(folder: Path, key: str, build: Build) -> None:
    work = folder / f"{key}.{_me()}-{uuid.uuid4().hex[:8]}.tmp"
    try:
        for left in folder.glob(f"{key}.{_me().rpartition('-')[0]}-*.tmp"):  # of a process here that was killed
            if not _is_alive(left.name.split("-")[-2]):
                shutil.rmtree(left, ignore_errors=True)
        work.mkdir()
        meta = build(work)
        files = sorted(file for file in work.iterdir() if file.is_file())
        for file in files:
            flush(file)
        document = {
            **meta,
            "files": {file.name: file.stat().st_size for file in files},
            "digests": {file.name: file_digest(file).xxh3_64 for file in files},
        }
        (work / META).write_text(json.dumps(document, indent=1))
        flush(work / META)
        try:
            work.rename(folder / key)
        except OSError:
            if not is_whole(folder / key):  # else somebody else was faster
                raise
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _me() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _is_alive(process: str) -> bool:
    return Path(f"/proc/{process}").exists()


def _unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(
        f"data.cache: tokens cannot be kept in {folder}: {error}",
        hint="choose a folder with room: data.cache, or the variable GRADUS_CACHE",
        field="data.cache",
        found=str(folder),
        allowed="a folder that can be written",
    )


# Locks of other processes as they were last seen: (owner's last sign of life, when this process saw it).
_seen: dict[Path, tuple[int, float]] = {}


@contextmanager
def _lock(folder: Path, key: str) -> Iterator[bool]:
    """Whether this process may build. Creating a file that must not exist is atomic on shared file systems too."""
    lock = folder / f"{key}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        _remove_if_stale(lock)
        yield False
        return
    except OSError as error:
        raise _unwritable(folder, error) from error
    with os.fdopen(descriptor, "w") as file:
        file.write(_me())
    done = threading.Event()
    beating = threading.Thread(target=_beat, args=(lock, done), daemon=True)
    beating.start()
    try:
        yield True
    finally:
        done.set()
        beating.join()
        lock.unlink(missing_ok=True)


def _beat(lock: Path, done: threading.Event) -> None:
    while not done.wait(HEARTBEAT_SECONDS):
        try:
            os.utime(lock)
        except OSError:  # taken over by somebody who thought this process dead: the rename decides
            return


def _remove_if_stale(lock: Path) -> None:
    """Clocks of nodes differ, so what counts is for how long this process has seen no sign of life."""
    try:
        sign, (host, _, process) = lock.stat().st_mtime_ns, lock.read_text().rpartition("-")
    except OSError:
        return
    known, since = _seen.get(lock, (0, 0.0))
    if known != sign:
        _seen[lock] = (sign, time.monotonic())
        since = time.monotonic()
    dead = host == socket.gethostname() and not _is_alive(process)
    if dead or time.monotonic() - since > STALE_SECONDS:
        # Renamed first: of several that see it, one succeeds, and nobody removes the lock of the next builder.
        grave = lock.with_name(f"{lock.name}.{uuid.uuid4().hex[:8]}")
        try:
            lock.rename(grave)
            grave.unlink()
        except OSError:
            return
