"""Process: what the kernel says of the processes of this machine, in /proc."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    pid: int
    state: str  # a letter, see proc(5)
    parent: int

    @property
    def has_ended(self) -> bool:
        """Whether it is over, and only nobody has asked how it ended: the first process of a container may never."""
        return self.state in "ZX"


def process_of(pid: int) -> Process | None:
    """None: it is gone."""
    with contextlib.suppress(OSError, ValueError):
        # Its name comes first, in brackets, and may hold anything.
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return Process(pid, state, int(parent))
    return None


def processes() -> Iterator[Process]:
    """Those of this machine that are alive."""
    for entry in Path("/proc").glob("[0-9]*"):
        found = process_of(int(entry.name))  # processes come and go
        if found is not None and not found.has_ended:
            yield found


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; nothing where it is gone, or not ours to read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return {name: value for name, _, value in (entry.partition("=") for entry in text.split("\0"))}
