"""Following: what a launcher does while ranks work. It shows progress, exports, turns signals into stop requests."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

from gradus.launcher.attempt import Launch
from gradus.record.directory import RunDirectory
from gradus.record.display import Display
from gradus.record.events import EventWriter, Messages, rank_writer
from gradus.record.stop import request_stop
from gradus.record.tensorboard import TensorBoardExporter

POLL_SECONDS = 0.1


@dataclass
class Signals:
    """What was asked of this process by signals so far."""

    run: RunDirectory
    say: Callable[[str], None]
    first: str | None = None
    at_once: bool = False
    raises: bool = False  # whether a second Ctrl-C is a KeyboardInterrupt here, rather than a note for the launcher
    _answer: str | None = None

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
        asked = "stopping: the run saves after a few more steps (Ctrl-C again ends it at once)"
        if self.first is None or self._answer == asked:
            return
        answer = asked
        try:
            request_stop(self.run, self.first)
        except OSError as error:
            answer = f"the stop request cannot be written ({error.strerror}); trying again (Ctrl-C ends it at once)"
        if answer != self._answer:
            self.say(answer)
            self._answer = answer


class Following:
    """A live attempt as its launcher sees it. `poll` is meant to be called every POLL_SECONDS."""

    def __init__(self, launch: Launch, display: Display | None) -> None:
        self._display = display
        self._exporter = TensorBoardExporter(launch.run) if "tensorboard" in launch.recipe.exporters else None
        self._messages = Messages(launch.run, rank_writer(launch.attempt))
        self.signals = Signals(launch.run, self.say)

    def say(self, text: str) -> None:
        if self._display:
            self._display.say(text)

    def poll(self) -> None:
        self.signals.answer()
        for message in self._messages.poll():
            self.say(message)
        for follower in (self._display, self._exporter):
            if follower:
                follower.poll()

    def close(self) -> None:
        self.poll()
        for follower in (self._display, self._exporter):
            if follower:
                follower.close()


@contextlib.contextmanager
def following(
    launch: Launch, *, quiet: bool = False, stream: TextIO | None = None, plain: bool | None = None
) -> Iterator[Following]:
    """Follow an attempt that the caller starts inside; signals are stop requests meanwhile."""
    run, ranks = launch.run, launch.ranks
    events = EventWriter(run, f"launcher-attempt-{launch.attempt}")
    events.write("launch", attempt=launch.attempt, ranks=ranks, node=socket.gethostname())
    events.close()
    display = None if quiet else Display(run, launch.recipe.steps, stream, plain)
    followed = Following(launch, display)
    followed.say(f"{launch.recipe.name}: {ranks} rank{'s' if ranks > 1 else ''}, run {run.path}")
    try:
        with _handled(followed.signals):
            yield followed
    finally:
        followed.close()


@contextlib.contextmanager
def _handled(signals: Signals) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGUSR1 ask the run to save and stop; a second Ctrl-C ends it at once."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, signals.handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
