"""Following: what a launcher does while ranks work. It shows progress, exports, turns signals into stop requests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import TextIO

from gradus.faults.signals import SAVES, Signals, handled
from gradus.faults.silence import Silence
from gradus.launcher.attempt import STARTS_OVER, Launch, starts_over
from gradus.record.display import Display
from gradus.record.events import EventWriter, Messages, rank_writer
from gradus.record.exporters import LiveExporters
from gradus.record.format import count_text
from gradus.record.node import node_name
from gradus.record.status import read_status, write_status

POLL_SECONDS = 0.1
SCRIPT_IS_TOLD = "its ranks get SIGTERM, and whether they save is up to the script"
_BEAT_EVERY_SECONDS = 10.0


class Beat:
    """Keeps the status of a script's run fresh, as long as nobody else does: an own loop has a heartbeat itself."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._next = time.monotonic() + _BEAT_EVERY_SECONDS  # the attempt has just been written
        self._ours = True

    def poll(self) -> None:
        if not self._ours or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _BEAT_EVERY_SECONDS
        status = read_status(self._launch.run)
        self._ours = status is not None and status.pid == os.getpid() and not self._launch.has_own_loop
        if status is not None and self._ours:
            write_status(self._launch.run, replace(status, updated_at=datetime.now(timezone.utc)))


class Following:
    """A live attempt as its launcher sees it. `poll` is meant to be called every POLL_SECONDS."""

    def __init__(self, launch: Launch, display: Display | None) -> None:
        self._display = display
        # Nobody wants to find a dry run among the runs of a service.
        exporters = launch.recipe.exporters if launch.recipe and not launch.dry_run else []
        self._exporters = LiveExporters(launch.run, exporters, self.say)
        self._messages = Messages(launch.run, rank_writer(launch.attempt))
        self._beat = Beat(launch) if launch.script else None
        self.signals = Signals(launch.run, self.say)
        self.silence = Silence(launch.run, launch.attempt, launch.recipe, launch.ranks)
        if launch.script:
            self.signals.meaning = lambda: SAVES if launch.has_own_loop else SCRIPT_IS_TOLD

    @property
    def quiet(self) -> bool:
        return self._display is None

    def say(self, text: str) -> None:
        if self._display:
            self._display.say(text)

    def poll(self) -> None:
        self.signals.answer()
        if self._beat:
            self._beat.poll()
        for message in self._messages.poll():
            self.say(message)
        if self._display:
            self._display.poll()

    def close(self) -> None:
        self.poll()
        self._exporters.close()
        if self._display:
            self._display.close()


@contextlib.contextmanager
def following(
    launch: Launch, *, quiet: bool = False, stream: TextIO | None = None, plain: bool | None = None
) -> Iterator[Following]:
    """Follow an attempt that the caller starts inside; signals are stop requests meanwhile."""
    run, ranks = launch.run, launch.ranks
    events = EventWriter(run, f"launcher-attempt-{launch.attempt}")
    command = {"command": launch.script.text} if launch.script else {}
    events.write("launch", attempt=launch.attempt, ranks=ranks, node=node_name(), **command)
    events.close()
    steps = launch.recipe.steps if launch.recipe else None
    if launch.script:
        plain = True  # it has the screen to itself: its own output, and perhaps its own progress bar
    display = None if quiet else Display(run, steps, stream, plain)
    followed = Following(launch, display)
    where = "a dry run" if launch.dry_run else f"run {run.path}"
    followed.say(f"{run.name}: {count_text(ranks, 'rank')}, {where}")
    if starts_over(run, launch.attempt):
        followed.say(STARTS_OVER)
    try:
        with handled(followed.signals):
            yield followed
    finally:
        followed.close()
