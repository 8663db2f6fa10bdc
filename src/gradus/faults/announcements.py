"""Announcements: rank 0 names a step at which all ranks do something together, and every rank learns of it in time.

Ranks look once at each step boundary. They can be apart by at most three boundaries: a rank leaves boundary b only
after its device finished step b - 1, which took all ranks. A step announced four ahead is still to come everywhere.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, cast

import torch.distributed as dist

from gradus.parallel.world import World

Action = Literal["stop", "save", "committed"]
NOTICE_STEPS = 4


class Announcements:
    """What rank 0 announced and this rank has read so far."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen = 0
        self._read_at = -1  # the boundary at which the store was last asked
        # By action: at which boundary, and about what. More than one stop or save only on a rank that is behind: it may
        # read of the next before it has come to this.
        self._pending: dict[Action, deque[tuple[int, int]]] = {"stop": deque(), "save": deque(), "committed": deque()}

    def announce(self, action: Action, step: int, about: int = 0) -> None:
        """On rank 0, at the boundary after `step` steps: all ranks shall act soon, at the same boundary.

        What is about something is announced each time; a stop or a save that is still to come is not announced again.
        """
        assert self._world.leads
        if self._pending[action] and not about:
            return
        at = step if self._world.store is None else step + NOTICE_STEPS
        self._pending[action].append((at, about))
        if self._world.store is not None:
            self._world.store.set(f"announcement-{self._seen}", f"{action} {at} {about}")
            self._seen += 1

    def due(self, action: Action, step: int) -> bool:
        """Whether all ranks act at this boundary. Call at every boundary, for every action."""
        return self.taken(action, step) is not None

    def taken(self, action: Action, step: int) -> int | None:
        """What the action that is due at this boundary is about, if one is."""
        if not self._world.leads and step != self._read_at:  # once for all actions: it is a round trip
            self._read()
            self._read_at = step
        pending = self._pending[action]
        if not pending or pending[0][0] > step:
            return None
        return pending.popleft()[1]

    def _read(self) -> None:
        store = self._world.store
        assert store is not None
        try:
            while store.check([f"announcement-{self._seen}"]):
                action, at, about = store.get(f"announcement-{self._seen}").decode().split()
                self._pending[cast(Action, action)].append((int(at), int(about)))
                self._seen += 1
        except dist.DistNetworkError:
            # Under mpirun rank 0 holds the store, and may have left after the last step: nobody announces any more.
            # If it was not the last, the next collective tells of a lost peer.
            return
