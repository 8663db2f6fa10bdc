"""How an attempt ended, as its ranks tell the launcher: torchrun reports every failure as exit code 1."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradus.record import strict_json
from gradus.record.directory import RunDirectory

# What file systems without hard links (FAT, some FUSE and parallel ones) answer to a link.
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def write_outcome(run: RunDirectory, attempt: int, outcome: Mapping[str, Any]) -> bool:
    """Leave the outcome of an attempt, unless another rank was first: the first failure causes the others.

    Returns whether this outcome is the one that stands. Raises OSError when nothing can be written at all.
    """
    target = run.outcome_path(attempt)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x") as file:
            file.write(strict_json.encode(outcome) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return _claim(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_outcome(run: RunDirectory, attempt: int) -> dict[str, Any] | None:
    """The outcome that stands, or None if no rank left one, or has not yet written it whole."""
    try:
        return strict_json.decode(run.outcome_path(attempt).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _claim(temporary: Path, target: Path) -> bool:
    try:
        os.link(temporary, target)  # unlike a rename, a link never replaces what is there
    except FileExistsError:
        # NFS repeats a request whose answer was lost, and then says "exists" about our own link.
        return temporary.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _create(target, temporary.read_bytes())
    return True


def _create(target: Path, content: bytes) -> bool:
    """As a link, but for a moment the target is there and empty, which readers take for not there yet."""
    try:
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    try:
        written = os.write(file, content)
        if written < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        os.fsync(file)
    except OSError:
        target.unlink()  # half an outcome would only keep that of another rank out
        raise
    finally:
        os.close(file)
    return True
