"""How an attempt ended, as its ranks tell the launcher: torchrun reports every failure as exit code 1."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradus.record import strict_json
from gradus.record.directory import RunDirectory


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
    """The outcome that stands, or None if no rank left one."""
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
    return True
