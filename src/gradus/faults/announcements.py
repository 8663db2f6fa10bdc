"""Announcements: rank 0 names a step at which all ranks do something together, and every rank learns of it in time.

Ranks look once at each step boundary. They can be apart by at most three boundaries: a rank leaves boundary b only
after its device finished step b - 1, which took all ranks. A step announced four ahead is still to come everywhere.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from gradus.parallel.world import World

Action = Literal["stop", "save"]
NOTICE_STEPS = 4


class Announcements:
    """What rank 0 announced and this rank has read so far."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen = 0
        self._read_at = -1  # the boundary at which the store was last asked
        # More than one of an action only on a rank that is behind: it may read of the next before it has come to this.
        self._pending: dict[Action, deque[int]] = {"stop": deque(), "save": deque()}

    def announce(self, action: Action, step: int) -> None:
        """On rank 0, at the boundary after `step` steps: all ranks shall act soon, at the same boundary."""
        assert self._world.leads
        if self._pending[action]:
            return
        at = step if self._world.store is None else step + NOTICE_STEPS
        self._pending[action].append(at)
        if self._world.store is not None:
            self._world.store.set(f"announcement-{self._seen}", f"{action} {at}")
            self._seen += 1

    def due(self, action: Action, step: int) -> bool:
        """Whether all ranks act at this boundary. Call at every boundary, for every action."""
        if not self._world.leads and step != self._read_at:  # once for all actions: it is a round trip
            self._read()
            self._read_at = step
        pending = self._pending[action]
        if not pending or pending[0] > step:
            return False
        pending.popleft()
        return True

    def _read(self) -> None:
        store = self._world.store
        assert store is not None
        while store.check([f"announcement-{self._seen}"]):
            action, at = store.get(f"announcement-{self._seen}").decode().split()
            self._pending["stop" if action == "stop" else "save"].append(int(at))
            self._seen += 1
