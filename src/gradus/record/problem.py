"""Problems of recording: they are reported, and training goes on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

OnProblem = Callable[[str], None]


def report_on_stderr(message: str) -> None:
    """Say it on stderr. Where stderr is a log on the same full disk, that fails too, and must not stop training."""
    with contextlib.suppress(OSError, ValueError):
        print(f"gradus: {message}", file=sys.stderr, flush=True)
