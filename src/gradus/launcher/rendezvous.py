"""Rendezvous: whether the ranks of a script ever met, seen from outside.

A rank that initialises a process group connects to the store that torchrun hosts, or, if the script names another way
to meet, to other ranks. The kernel lists such connections, and keeps those to the store for a minute after their end.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_LOOK_EVERY_SECONDS = 1.0
_OF_TORCHRUN = 1  # it is a client of its own store


@dataclass(frozen=True)
class Connection:
    """One end of a TCP connection. `inode` is 0 once nobody holds it."""

    local: str
    remote: str
    inode: int

    @property
    def remote_port(self) -> int:
        return int(self.remote.rpartition(":")[2], 16)


class Rendezvous:
    """Remembers whether any rank met another one, as far as could be seen."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._before = self._to_the_store()  # of somebody who had the port until a moment ago
        self._seen: set[str] = set()
        self._next_look = 0.0
        self.met = False

    @property
    def never_met(self) -> bool:
        """Whether it is known that no rank ever met another. Looking may have been impossible."""
        return bool(self._seen) and not self.met

    def poll(self, ranks: Callable[[], Iterable[int]] = tuple, now: bool = False) -> None:
        """Look once a second, and no more once they have met."""
        if self.met or (time.monotonic() < self._next_look and not now):
            return
        self._next_look = time.monotonic() + _LOOK_EVERY_SECONDS
        self._seen |= self._to_the_store() - self._before
        self.met = len(self._seen) > _OF_TORCHRUN or _are_connected(ranks())

    def _to_the_store(self) -> set[str]:
        return {found.local for found in _connections() if found.remote_port == self._port}


def _are_connected(ranks: Iterable[int]) -> bool:
    """Whether a connection has one of these processes at one end and another one at the other."""
    owners = {inode: pid for pid in ranks for inode in _sockets(pid)}
    ends = {(found.local, found.remote): owners[found.inode] for found in _connections() if found.inode in owners}
    return any(ends.get((remote, local), pid) != pid for (local, remote), pid in ends.items())


def _connections() -> Iterator[Connection]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                columns = line.split()
                yield Connection(_mapped(columns[1]), _mapped(columns[2]), int(columns[9]))


def _mapped(address: str) -> str:
    """An IPv4 address looks the same in both tables."""
    return address.removeprefix("0000000000000000FFFF0000")


def _sockets(pid: int) -> set[int]:
    found = set()
    with contextlib.suppress(OSError):
        for file in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{file}")
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found
