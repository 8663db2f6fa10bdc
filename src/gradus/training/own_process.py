"""The process of an own loop: signals as stop requests, failures told before it ends, progress on its stderr.

Inside the loop there is no launcher's code around the user's: what a rank of a recipe does in `rank.py`, this does for
a script that was started by anybody.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from gradus.record.directory import RunDirectory
from gradus.record.display import Display
from gradus.record.stop import request_stop
from gradus.schema.errors import EXIT_FAILED, GradusError
from gradus.training.leaving import tell_failure

POLL_SECONDS = 0.2


class SignalNotes:
    """The first signal asks the run to stop; Ctrl-C once more interrupts it."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._asked: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Only a note: a handler that writes can interrupt the very same write.
        if self._asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = signal.Signals(number).name

    def answer(self) -> None:
        """Turn the note into a stop request, for all ranks to see."""
        if self._asked is not None and not self._run.stop_file.exists():
            request_stop(self._run, self._asked)

    def close(self) -> None:
        """Signals mean again what they meant before."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)
        self._before = {}


class Shown:
    """Progress on this process's own stderr, where no launcher shows it."""

    def __init__(self, run: RunDirectory, steps_total: int | None, greeting: str) -> None:
        self._display = Display(run, steps_total)
        self._display.say(greeting)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="gradus-display", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            self._display.poll()

    def close(self) -> None:
        if not self._done.is_set():
            self._done.set()
            self._thread.join()
            self._display.close()


def on_failure(
    run: RunDirectory, attempt: int, rank: int, close: Callable[[str], None], is_over: Callable[[], bool]
) -> None:
    """An exception that nobody catches is told to whoever launched this, and ends the process at once.

    At once, because peers may be in a collective with this rank: closing the group would wait for them.
    """
    before = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_over():  # the run has told how it ended: what fails now is none of it
            before(kind, error, trace)
            return
        close(str(error) or kind.__name__)
        if isinstance(error, GradusError):
            _print_error(error)
        else:
            before(kind, error, trace)
        if isinstance(error, Exception):
            tell_failure(run, attempt, error, rank)
        _end(error)

    sys.excepthook = failed


def on_refusal(error: GradusError) -> None:
    """Bad input before there is a run: said in two lines, with the exit code that belongs to it."""
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:  # somebody types this: they want the exception
        return
    before = sys.excepthook

    def told(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            before(kind, raised, trace)
            return
        _print_error(error)
        run, attempt = os.environ.get("GRADUS_RUN"), os.environ.get("GRADUS_ATTEMPT")
        if run is not None and attempt is not None:
            tell_failure(RunDirectory(Path(run)), int(attempt), error, int(os.environ.get("RANK", "0")))
        _end(error)

    sys.excepthook = told


def _print_error(error: GradusError) -> None:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    if error.__cause__ is not None:
        traceback.print_exception(error.__cause__)


def _end(error: BaseException) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code if isinstance(error, GradusError) else EXIT_FAILED)
