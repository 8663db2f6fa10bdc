"""Stop requests: a file in the run's control folder, or a job that ends soon. Rank 0 alone looks, once a second."""

from __future__ import annotations

import time
from pathlib import Path

from gradus.faults.deadline import Deadline
from gradus.parallel.world import World
from gradus.record.stop import end_in, reason_in

# Launchers look once a second and kill at once. Where there is none (a loop that plain python started on another
# machine), the run leaves by itself after this, saved.
_ENDED_WITHIN_SECONDS = 15.0


class StopRequest:
    """Whether the run was asked to stop, as far as this rank can know now."""

    def __init__(
        self, stop_file: Path, world: World, look_every_seconds: float = 1.0, deadline: Deadline | None = None
    ) -> None:
        self._file = stop_file
        self._world = world
        self.deadline = deadline
        self.look_every_seconds = look_every_seconds
        self._next_look = 0.0
        self._end_asked_at: float | None = None
        self.reason: str | None = None
        self.by_deadline = False  # as rank 0 knows

    def seen(self) -> bool:
        """Cheap enough for every step and every evaluation batch. Ranks may learn of a request at different moments."""
        if self.reason is None:
            self.reason = self._look() if self._world.leads else self._told()
        return self.reason is not None

    def _look(self) -> str | None:
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + self.look_every_seconds
        reason = reason_in(self._file)
        if reason is not None and end_in(self._file) is not None:
            self._end_asked_at = now if self._end_asked_at is None else self._end_asked_at
            if now - self._end_asked_at < _ENDED_WITHIN_SECONDS:
                return None  # to be ended without a save: that is the launcher's to do
        if reason is None and self.deadline is not None:
            reason = self.deadline.reason()
            self.by_deadline = reason is not None
        if reason is not None and self._world.store is not None:
            self._world.store.set("stop-requested", reason)
        return reason

    def _told(self) -> str | None:
        store = self._world.store
        assert store is not None
        return store.get("stop-requested").decode() if store.check(["stop-requested"]) else None
