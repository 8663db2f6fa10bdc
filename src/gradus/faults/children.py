"""Children: the processes that a process has started, and those that they have."""

from __future__ import annotations

import contextlib
import os
import signal

from gradus.record.process import processes


def children_of(pid: int) -> list[int]:
    """Those that are alive."""
    return _by_parent().get(pid, [])


def descendants(pid: int) -> list[int]:
    """All processes below this one that are alive."""
    children = _by_parent()
    found, to_do = [], [pid]
    while to_do:
        below = children.get(to_do.pop(), [])
        found += below
        to_do += below
    return found


def kill_descendants(pid: int) -> None:
    """None of them outlives this process: a loader worker that is stuck in user code would not notice its end."""
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)


def _by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process.pid)
    return children
