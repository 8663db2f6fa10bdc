"""A stop request for a script: it knows nothing of request files, so its ranks get SIGTERM, each of them once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

from gradus.launcher.attempt import Launch
from gradus.launcher.following import SCRIPT_IS_TOLD
from gradus.record.events import EventWriter
from gradus.record.stop import requested_stop

_LOOK_EVERY_SECONDS = 1.0


class ScriptStop:
    """Passes a stop request on to the ranks, and not to torchrun, which would kill them half a minute later."""

    def __init__(self, launch: Launch, say: Callable[[str], None]) -> None:
        self._launch = launch
        self._say = say
        self._signalled: set[int] = set()
        self._next_look = 0.0
        self._asked: str | None = None
        self.reason: str | None = None  # set when the first rank was told

    def poll(self, signal_name: str | None, ranks: Callable[[], Iterable[int]]) -> None:
        """`signal_name` is the signal to the launcher that was a stop request, if there was one."""
        reason = signal_name or self._look()
        if reason is None or self._launch.has_own_loop:
            return
        for pid in ranks():
            if pid not in self._signalled:
                self._signalled.add(pid)
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(pid, signal.SIGTERM)
                    self._note(reason, known=signal_name is not None)

    def _note(self, reason: str, known: bool) -> None:
        if self.reason is not None:
            return
        self.reason = reason
        events = EventWriter(self._launch.run, f"launcher-attempt-{self._launch.attempt}")
        events.write("stop-request", attempt=self._launch.attempt, reason=reason, signal="SIGTERM")
        events.close()
        if not known:
            self._say(f"stopping ({reason}): {SCRIPT_IS_TOLD}")

    def _look(self) -> str | None:
        if self._asked is None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_EVERY_SECONDS
            self._asked = requested_stop(self._launch.run)
        return self._asked
