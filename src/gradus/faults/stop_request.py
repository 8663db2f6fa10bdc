"""Stop requests: a file in the run's control folder, which rank 0 alone looks for, at most once a second."""

from __future__ import annotations

import time
from pathlib import Path

from gradus.parallel.world import World
from gradus.record.stop import reason_in


class StopRequest:
    """Whether the run was asked to stop, as far as this rank can know now."""

    def __init__(self, stop_file: Path, world: World, look_every_seconds: float = 1.0) -> None:
        self._file = stop_file
        self._world = world
        self.look_every_seconds = look_every_seconds
        self._next_look = 0.0
        self.reason: str | None = None

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
        if reason is not None and self._world.store is not None:
            self._world.store.set("stop-requested", reason)
        return reason

    def _told(self) -> str | None:
        store = self._world.store
        assert store is not None
        return store.get("stop-requested").decode() if store.check(["stop-requested"]) else None
