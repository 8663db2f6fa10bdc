"""Signals: Ctrl-C, SIGTERM and SIGUSR1 to a process become a stop request of its run. A signal never saves anything."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from gradus.faults.stop_signals import STOP_SIGNALS
from gradus.record.directory import RunDirectory
from gradus.record.stop import request_stop, requested_stop

SAVES = "the run saves after a few more steps"
SECOND_INTERRUPT = "a second interrupt"  # by what a run is ended at once


@dataclass
class Signals:
    """What was asked of this process by signals so far."""

    run: RunDirectory
    say: Callable[[str], None]
    first: str | None = None
    at_once: bool = False
    raises: bool = False  # whether a second Ctrl-C is a KeyboardInterrupt here, rather than a note for the launcher
    meaning: Callable[[], str] = lambda: SAVES  # what stopping means here
    _answered: bool = False
    _said: str | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        # Only a note: a handler that prints or writes can interrupt the very same print or write.
        if self.first is None:
            self.first = signal.Signals(number).name
        elif number == signal.SIGINT:
            self.at_once = True
            if self.raises:
                raise KeyboardInterrupt

    def answer(self) -> None:
        """Turn the first signal into a stop request; on a disk that is full now, try again at the next call."""
        if self.first is None or self._answered:
            return
        answer = f"stopping: {self.meaning()} (Ctrl-C again ends it at once)"
        try:
            if requested_stop(self.run) is None:  # what was asked for before stands: to be held, or to end at once
                request_stop(self.run, self.first)
            self._answered = True
        except OSError as error:
            answer = f"the stop request cannot be written ({error.strerror}); trying again (Ctrl-C ends it at once)"
        if answer != self._said:
            self.say(answer)
            self._said = answer


@contextlib.contextmanager
def handled(signals: Signals) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGUSR1 ask the run to save and stop; a second Ctrl-C ends it at once."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    numbers = (signal.SIGINT, *STOP_SIGNALS)
    before = {number: signal.signal(number, signals.handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
