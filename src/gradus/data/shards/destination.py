"""The folder that is packed into: nobody else's data, one packing at a time, and what is said when it has no room."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradus.data.shards.description import DESCRIPTION, read_description
from gradus.data.shards.storage import Storage
from gradus.schema.errors import GradusError, InputError

WORK = ".packing"
PLAN = "plan.json"


def check_folder(folder: Path, specification: str) -> None:
    """Refuse a folder with anything in it but this very dataset, finished or not."""
    if folder.exists() and not folder.is_dir():
        message = f"DEST: {folder} is a file, allowed: a new or empty folder"
        raise InputError(message, field="DEST", found=str(folder), allowed="a new or empty folder")
    there = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    # Killed before its plan was written, a packing has left nothing but its working folder.
    begun = there and not (there == [WORK] and not (folder / WORK / PLAN).exists())
    known = _specification(folder) if begun else specification
    if known == specification:
        return
    if known is None:
        message = f"DEST: {folder} has other data in it: {', '.join(there[:3])}{' …' if len(there) > 3 else ''}"
    else:
        what = "a packing" if (folder / DESCRIPTION).exists() else "an unfinished packing"
        message = f"DEST: {folder} holds {what} of other data, or of the same with other options"
    hint = "choose a new folder, or remove this one"
    raise InputError(message, hint=hint, field="DEST", found=str(folder), allowed="a new or empty folder")


def _specification(folder: Path) -> str | None:
    """Of what is packed in a folder, or is being packed; None if that is nothing of ours."""
    try:
        if (folder / DESCRIPTION).exists():
            return str(read_description(Storage(str(folder)), "DEST").packed.get("specification"))
        return str(json.loads((folder / WORK / PLAN).read_text())["specification"])
    except (OSError, ValueError, KeyError, TypeError, InputError):
        return None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One packing in a folder at a time. The kernel lets go of the lock when the process ends, however it ends."""
    work = folder / WORK
    try:
        work.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(work / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"DEST: another process is packing into {folder}"
            raise GradusError(message, hint="wait for it, or choose another folder") from None
        yield
    finally:
        os.close(descriptor)


def unwritable(folder: Path, error: OSError) -> GradusError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = f"{shutil.disk_usage(folder).free / 2**30:.3g} GiB are free"
        except OSError:
            free = "no room is left"
        message = f"DEST: the disk is full: {free} in {folder}. Finished shards are kept, nothing else is"
        return GradusError(message, hint="make room; the same command then goes on where it stopped")
    if error.filename is not None and not str(error.filename).startswith(str(folder)):
        return GradusError(f"SOURCE: {error.filename} cannot be read: {error.strerror}")
    return GradusError(f"DEST: {folder} cannot be written: {error}", hint="the same command goes on where it stopped")
