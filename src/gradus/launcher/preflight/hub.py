"""Hub: where the tasks of a preflight meet. The first node's task answers the others, over plain TCP.

Lines of JSON, a question and its answer in turn. It carries who is there, whose turn it is, the time, and reports: no
shared folder is needed for it, since whether there is one is among the questions.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_PINGS = 20
_CONNECT_SECONDS = 3.0
_AGAIN_SECONDS = 0.1
PORTS = 8  # the hub takes the first of so many that is free, and the others try all of them


@dataclass(frozen=True)
class Clock:
    """How far a clock is ahead of this one: the middle of the quickest round trip, give or take half of it."""

    offset_seconds: float
    uncertainty_seconds: float


class Hub:
    """Answers until it is closed. What waits for all does so until they are there, have left, or time is up."""

    def __init__(self, expected: int, key: str, first_port: int, until: float) -> None:
        """`key` tells our tasks from strangers; `until` is when nobody waits any longer, as time.monotonic() counts."""
        self._expected, self._key, self._until = expected, key, until
        self._members: dict[int, dict[str, Any]] = {}
        self._gone: set[int] = set()
        self._arrived: dict[str, dict[int, bool]] = {}
        self._changed = threading.Condition()
        self.reports: dict[int, dict[str, Any]] = {}
        self._server = _listening(first_port)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def wait_for_reports(self, until: float) -> None:
        """Until all that came have reported, or have left."""
        with self._changed:
            self._changed.wait_for(
                lambda: set(self._members) <= set(self.reports) | self._gone, max(0.0, until - time.monotonic())
            )

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        index = None
        with connection, connection.makefile("rw") as stream, contextlib.suppress(OSError, ValueError):
            for line in stream:
                question = json.loads(line)
                if index is None and question.get("key") != self._key:
                    return
                index = int(question["index"])
                stream.write(json.dumps(self._answer(index, question)) + "\n")
                stream.flush()
                if question["ask"] == "report":  # only now: once it has all reports, this task may end
                    with self._changed:
                        self.reports[index] = question["report"]
                        self._changed.notify_all()
        if index is not None:
            with self._changed:
                self._gone.add(index)
                self._changed.notify_all()

    def _answer(self, index: int, question: dict[str, Any]) -> dict[str, Any]:
        asked = question["ask"]
        if asked == "time":
            return {"time": time.time()}
        if asked == "report":
            return {}
        with self._changed:
            if asked == "join":
                self._members[index] = question["member"]
                self._changed.notify_all()
                self._wait(lambda: len(self._members) == self._expected, question["seconds"])
                return {"members": [{"index": at, **self._members[at]} for at in sorted(self._members)]}
            here = self._arrived.setdefault(question["name"], {})
            here[index] = question["vote"]
            self._changed.notify_all()
            self._wait(lambda: set(self._members) <= set(here) | self._gone, question["seconds"])
            late = sorted(set(self._members) - set(here))
            return {"late": late, "agreed": not late and all(here.values())}

    def _wait(self, condition: Any, seconds: float) -> None:
        self._changed.wait_for(condition, max(0.0, min(seconds, self._until - time.monotonic())))


class Member:
    """One task's line to the hub."""

    def __init__(self, connection: socket.socket, index: int, key: str) -> None:
        self._stream = connection.makefile("rw")
        self._connection, self._index, self._key = connection, index, key

    @classmethod
    def connected(cls, addresses: Sequence[str], first_port: int, index: int, key: str, until: float) -> Member:
        """Try all addresses and ports until one of them is the hub; OSError with the last reason when time is up."""
        why: Exception = OSError("there is no address to try")
        while True:  # once at least, however late it is
            for address, port in ((a, first_port + p) for a in addresses for p in range(PORTS)):
                try:
                    connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.settimeout(max(1.0, until - time.monotonic() + 60))
                    member = cls(connection, index, key)
                    member.ask("time")  # a stranger does not answer
                    return member
                except (OSError, ValueError) as error:
                    if not isinstance(error, ConnectionRefusedError) or isinstance(why, ConnectionRefusedError):
                        why = error
            if time.monotonic() >= until:
                raise OSError(f"{', '.join(addresses) or 'nowhere'}, ports from {first_port} on: {why}")
            time.sleep(_AGAIN_SECONDS)

    def ask(self, question: str, **more: Any) -> dict[str, Any]:
        line = json.dumps({"key": self._key, "index": self._index, "ask": question, **more})
        self._stream.write(line + "\n")
        self._stream.flush()
        answer = self._stream.readline()
        if not answer:
            raise OSError("the hub has closed the connection")
        found: dict[str, Any] = json.loads(answer)
        return found

    def join(self, member: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Say who this is, and learn who else is there: all, or those that came in time."""
        members: list[dict[str, Any]] = self.ask("join", member=member, seconds=seconds)["members"]
        return members

    def barrier(self, name: str, seconds: float) -> list[int]:
        """Wait for all; who did not come in time."""
        late: list[int] = self.ask("barrier", name=name, seconds=seconds, vote=True)["late"]
        return late

    def agreed(self, name: str, vote: bool, seconds: float) -> bool:
        """Wait for all; whether all are for it."""
        return bool(self.ask("barrier", name=name, seconds=seconds, vote=vote)["agreed"])

    def clock(self) -> Clock:
        """Of the hub, as seen from here, without trusting that anybody keeps them equal."""
        best = Clock(0.0, float("inf"))
        for _ in range(_PINGS):
            sent = time.time()
            there = float(self.ask("time")["time"])
            back = time.time()
            if (back - sent) / 2 < best.uncertainty_seconds:
                best = Clock(there - (sent + back) / 2, max(0.0, (back - sent) / 2))
        return best

    def report(self, report: dict[str, Any]) -> None:
        self.ask("report", report=report)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
        self._connection.close()


def _listening(first_port: int) -> socket.socket:
    """At the first port that is free. Port 0 is any."""
    ports: Iterable[int] = range(first_port, first_port + PORTS) if first_port else [0]
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), backlog=512)
    raise OSError(f"ports {first_port} to {first_port + PORTS - 1} are all in use")
