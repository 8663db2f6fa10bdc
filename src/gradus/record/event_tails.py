"""Event tails: follows the events of all writers of a run, of which more appear while it goes on."""

from __future__ import annotations

import os
from typing import Any

from gradus.record.append_log import LogTail
from gradus.record.directory import RunDirectory


class EventTails:
    """Each poll returns what was added since the last one, in the order of time. Files that did not grow stay closed:
    a thousand ranks may each have one."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._tails: dict[str, LogTail] = {}
        self._sizes: dict[str, int] = {}

    def poll(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        try:
            with os.scandir(self._run.events) as entries:
                sizes = {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(".jsonl")}
        except OSError:  # a stale handle of a network file system: the next poll reads on
            return []
        for name in sorted(sizes):
            if sizes[name] != self._sizes.get(name):
                found += self._tails.setdefault(name, LogTail(self._run.events / name)).poll()
        self._sizes = sizes
        return sorted(found, key=lambda event: str(event.get("time", "")))
