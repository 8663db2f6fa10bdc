"""Patience: what cannot be read now may be readable in a moment. That is no damage, nor reason to go back. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gradus.schema.errors import GradusError

# Of all that reading can fail with, what says that bytes are not there. Servers, networks, permissions and memory come
# back; a run that took those for damage would go on from an older step, and give up what it has.
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Seconds until the next try: 7.5 in all. Whoever restarts a run that failed for this tries for longer.
DELAYS = (0.5, 1.0, 2.0, 4.0)

_Result = TypeVar("_Result")


class UnreadableCheckpoint(GradusError):
    """A checkpoint that cannot be read at present, of which nobody knows whether it is whole."""

    kind = "unreadable-checkpoint"


def patiently(file: Path, read: Callable[[], _Result]) -> _Result:
    """Read something, again after a while if it fails for what may pass. What is gone is for the caller to judge."""
    for delay in (*DELAYS, None):
        try:
            return read()
        except GONE:
            raise
        except OSError as error:
            if delay is None:
                raise UnreadableCheckpoint(
                    f"{error.filename or file}: cannot be read: {error.strerror or error}",
                    hint="when its file system can be read again, go on with --resume. If it never can, move this "
                    "checkpoint's folder away: --resume then goes on from the one before",
                    path=str(file),
                ) from error
        time.sleep(delay)
    raise AssertionError
