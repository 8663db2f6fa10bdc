"""The process of an own loop: failures told before it ends, progress on its stderr.

Inside the loop there is no launcher's code around the user's: what a rank of a recipe does in `rank.py`, this does for
a script that was started by anybody.
"""

from __future__ import annotations

import builtins
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from pathlib import Path
from types import TracebackType
from typing import Any

from gradus.record.directory import RunDirectory
from gradus.record.display import Display
from gradus.record.format import first_line
from gradus.record.polling import Polling
from gradus.record.variables import ATTEMPT, RUN
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED, GradusError
from gradus.training.leaving import end, leave, tell_failure
from gradus.training.out_of_memory import OutOfMemory

POLL_SECONDS = 0.2


class Shown:
    """Progress on this process's own stderr, where no launcher shows it."""

    def __init__(self, run: RunDirectory, steps_total: int | None, greeting: str) -> None:
        self._display = Display(run, steps_total)
        self._drawing = threading.Lock()  # the loop says something while progress is drawn
        self.say(greeting)
        self._polling: Polling | None = Polling(self._poll, POLL_SECONDS)

    def say(self, text: str) -> None:
        with self._drawing:
            self._display.say(text)

    def _poll(self) -> None:
        with self._drawing:
            self._display.poll()

    def close(self) -> None:
        if self._polling is not None:
            self._polling.close()
            self._polling = None
            self._display.close()


def on_failure(
    run: RunDirectory,
    attempt: int,
    rank: int,
    close: Callable[[str], None],
    is_over: Callable[[], bool],
    explained: Callable[[BaseException], BaseException],
) -> None:
    """An exception that nobody catches is told to whoever launched this, as `explained`, and ends the process at once.

    At once, because peers may be in a collective with this rank: closing the group would wait for them.
    """
    _tell_ours_briefly()
    before = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_over():  # the run has told how it ended: what fails now is none of it
            before(kind, error, trace)
            return
        with _said_beside():
            error = explained(error)
        with _said_beside():
            close(str(error) or kind.__name__)
        if isinstance(error, GradusError):
            _print_error(error)
        else:
            before(kind, error, trace)
            if sys.version_info < (3, 11):  # which does not show them
                for note in getattr(error, "__notes__", ()):
                    print(note, file=sys.stderr)
        if isinstance(error, Exception):
            with _said_beside():
                tell_failure(run, attempt, error, rank)
        end(error.exit_code if isinstance(error, GradusError) else EXIT_FAILED)

    sys.excepthook = failed


@contextmanager
def exits_noted(note: Callable[[SystemExit], None]) -> Iterator[None]:
    """Inside, `note` is told when the script asks Python to leave, which itself tells nobody with what code it does."""
    with ExitStack() as restored:
        for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            if hasattr(place, name):  # the builtins are not there with `python -S`
                restored.enter_context(_noted(place, name, note))
        yield


@contextmanager
def _noted(place: Any, name: str, note: Callable[[SystemExit], None]) -> Iterator[None]:
    before = getattr(place, name)

    @wraps(before, updated=())
    def leaving(*arguments: Any) -> None:
        try:
            before(*arguments)
        except SystemExit as error:
            if threading.current_thread() is threading.main_thread():  # else only the thread ends
                note(error)
            raise

    setattr(place, name, leaving)
    try:
        yield
    finally:
        if getattr(place, name) is leaving:  # and not something that the script has put there
            setattr(place, name, before)


def exit_code(code: object) -> int:
    """What a process leaves with that told Python to do so with `code`."""
    if isinstance(code, int):
        return int(code)
    return EXIT_FINISHED if code is None else EXIT_FAILED


def failed_exit(code: object, rank: int | None) -> str | None:
    """How a script left that told Python to do so with `code`; None if in good order. `rank`: which of several."""
    if exit_code(code) == EXIT_FINISHED:
        return None
    who = "the script" if rank is None else f"the script of rank {rank}"
    said = "" if isinstance(code, int) else f": {first_line(str(code))}"  # Python prints what is no number
    return f"{who} left with exit code {exit_code(code)}{said}"


@contextmanager
def _said_beside() -> Iterator[None]:
    """What goes wrong while a failure is told is said as well. It must not take the failure's place."""
    try:
        yield
    except Exception:
        traceback.print_exc()


@cache
def _tell_ours_briefly() -> None:
    """Once for a process: an error of ours that is of no run, and that nobody catches, is told as the commands do."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, GradusError) or _somebody_types():
            before(kind, error, trace)
            return
        _print_error(error)
        leave(error.exit_code)

    sys.excepthook = told


def on_refusal(error: GradusError) -> None:
    """Bad input before there is a run: said in two lines, with the exit code that belongs to it."""
    if _somebody_types():
        return
    before = sys.excepthook

    def told(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            before(kind, raised, trace)
            return
        _print_error(error)
        run, attempt = os.environ.get(RUN), os.environ.get(ATTEMPT)
        if run is not None and attempt is not None:
            tell_failure(RunDirectory(Path(run)), int(attempt), error, int(os.environ.get("RANK", "0")))
        end(error.exit_code if isinstance(error, GradusError) else EXIT_FAILED)

    sys.excepthook = told


def _somebody_types() -> bool:
    """Into a prompt or a notebook: they want the exception, and to go on."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _print_error(error: GradusError) -> None:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    if error.__cause__ is not None and not isinstance(error, OutOfMemory):  # of which it tells all that there is
        traceback.print_exception(error.__cause__)
