"""A stop request for a script: it knows nothing of request files, so its ranks get SIGTERM, each of them once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from gradus.launcher.attempt import Launch
from gradus.launcher.following import SCRIPT_IS_TOLD
from gradus.record.events import EventWriter
from gradus.record.stop import requested_stop

_LOOK_EVERY_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0  # some scripts save when they are told, which takes a while
_SAY_EVERY_SECONDS = 60.0


class ScriptStop:
    """Passes a stop request on to the ranks, and not to torchrun, which would kill them half a minute later."""

    def __init__(
        self,
        launch: Launch,
        say: Callable[[str], None],
        *,
        patience_seconds: float = _PATIENCE_SECONDS,
        say_every_seconds: float = _SAY_EVERY_SECONDS,
    ) -> None:
        self._launch = launch
        self._say = say
        self._patience = patience_seconds
        self._say_every = say_every_seconds
        self._say_at: float | None = None
        self._signalled: set[int] = set()
        self._next_look = 0.0
        self._asked: str | None = None
        self.reason: str | None = None  # set when the first rank was told

    def poll(self, signal_name: str | None, ranks: Callable[[], Mapping[int, int]]) -> None:
        """`signal_name` is the signal to the launcher that was a stop request, if there was one.

        `ranks` gives the processes of those that are alive.
        """
        reason = signal_name or self._look()
        if reason is None or self._launch.has_own_loop:
            return
        alive = ranks()
        for pid in alive.values():
            if pid not in self._signalled:
                self._signalled.add(pid)
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(pid, signal.SIGTERM)
                    self._note(reason, known=signal_name is not None)
        self._say_who_is_left(sorted(alive), interrupted=signal_name is not None)

    def _say_who_is_left(self, ranks: Sequence[int], *, interrupted: bool) -> None:
        now = time.monotonic()
        if self._say_at is None:
            self._say_at = now + self._patience
        if not ranks or now < self._say_at:
            return
        self._say_at = now + self._say_every
        many = len(ranks) > 1
        who = f"rank{'s' if many else ''} {', '.join(map(str, ranks))}"
        how = "Ctrl-C again" if interrupted else f"gradus runs stop {self._launch.run.path} --now"
        self._say(f"still waiting for {who} to leave; {how} ends {'them' if many else 'it'} at once")

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
