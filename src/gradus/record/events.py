"""Events of a run: one append-only file for each writer, merged on time by readers."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from gradus.record.append_log import AppendLog, LogTail, read_lines
from gradus.record.directory import RunDirectory
from gradus.record.problem import OnProblem, report_on_stderr


class EventWriter:
    """Appends to `events/<writer>.jsonl`. Each process has its own writer, so that none waits for another."""

    def __init__(self, run: RunDirectory, writer: str, on_problem: OnProblem = report_on_stderr) -> None:
        self._writer = writer
        self._log = AppendLog(run.events / f"{writer}.jsonl", on_problem)

    def write(self, event: str, /, **fields: Any) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._log.write({"time": now, "writer": self._writer, "event": event, **fields})

    def close(self) -> list[str]:
        return self._log.close()


def read_events(run: RunDirectory) -> list[dict[str, Any]]:
    """The events of all writers in the order of their times; those of one writer keep their order."""
    events = [record for path in sorted(run.events.glob("*.jsonl")) for record in read_lines(path).records]
    # All times are UTC in one format, so that text sorts as time does.
    return sorted(events, key=lambda event: str(event.get("time", "")))


class Messages:
    """Follows what an attempt's ranks have to say to people: the events that carry a message."""

    def __init__(self, run: RunDirectory, writer: str) -> None:
        self._tail = LogTail(run.events / f"{writer}.jsonl")

    def poll(self) -> list[str]:
        return [str(event["message"]) for event in self._tail.poll() if event.get("message")]


def rank_writer(attempt: int, rank: int = 0) -> str:
    """The name under which a rank writes the events of an attempt."""
    return f"rank-{rank}-attempt-{attempt}"
