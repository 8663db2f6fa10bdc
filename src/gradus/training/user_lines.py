"""The line of the user's own code that an exception went through: where to look when an error is deep in torch."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import gradus

# Code that is not the user's.
_LIBRARIES = ("<frozen", str(Path(gradus.__file__).parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))


def users_line(error: BaseException) -> traceback.FrameSummary | None:
    """The last line that is in neither a library nor gradus; None if the exception saw none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if not frame.filename.startswith(_LIBRARIES)), None)
