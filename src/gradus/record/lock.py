"""One launcher at a time: a lock that the operating system releases when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
from typing import TextIO

from gradus.record.directory import RunDirectory
from gradus.schema.errors import InputError


def locked(run: RunDirectory) -> TextIO:
    """Hold the run. The lock lasts as long as the file that is returned."""
    return held(
        run.control / "lock",
        InputError(
            f"{run.path}: the run is alive: another process holds it",
            hint="wait for it or stop it",
            found=str(run.path),
        ),
    )


def held(path: Path, refusal: InputError) -> TextIO:
    """Hold a file, or raise the refusal if another process does."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise refusal from None
    except OSError:
        pass  # a file system without locks: the age of the status is all there is to go by
    return file


def release(lock: TextIO) -> None:
    """Let go of a run. Not by closing alone: a loader's worker process that was forked meanwhile holds the file too."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_UN)
    lock.close()
