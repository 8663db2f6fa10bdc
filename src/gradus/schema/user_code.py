"""An exception in the user's own code, told as bad input: what raised it, and the line of theirs it came through."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gradus
from gradus.schema.errors import GradusError, InputError

OUR_FOLDER = str(Path(gradus.__file__).parent) + "/"
# Code that is not the user's.
_LIBRARIES = ("<frozen", OUR_FOLDER, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))


def users_line(error: BaseException) -> traceback.FrameSummary | None:
    """The last line that is in neither a library nor gradus; None if the exception saw none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if not frame.filename.startswith(_LIBRARIES)), None)


@contextmanager
def user_code(field: str, use: str) -> Iterator[None]:
    """An exception in the user's own function is bad input: it names the function and shows where it went wrong."""
    try:
        yield
    except GradusError:
        raise
    except Exception as error:
        raise raised_by_user(error, field, use) from error


def raised_by_user(error: Exception, field: str, use: str, hint: str | None = None) -> GradusError:
    """The exception as bad input; with a hint, what to do comes before where to look.

    A disk or a network that fails may work the next time: that is a failure, and no fault of the input.
    """
    lasting = not isinstance(error, OSError) or isinstance(error, (FileNotFoundError, NotADirectoryError))
    kind = InputError if lasting else GradusError
    line = users_line(error)
    last = line or traceback.extract_tb(error.__traceback__)[-1]
    where = f"the error is in {last.filename}, line {last.lineno}: {last.line}"
    if hint is not None:
        where = f"{hint}; {where}" if line is not None else hint
    return kind(
        f"{field}: {use} raised {type(error).__name__}: {error}",
        hint=where,
        field=field,
        found=use,
        traceback="".join(traceback.format_exception(error)),
    )
