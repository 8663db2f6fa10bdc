"""The newest records of a file of JSON lines, whatever its length: only its end is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gradus.record import strict_json

_END_BYTES = 2**16


def newest_records(path: Path, end_bytes: int = _END_BYTES) -> list[dict[str, Any]]:
    """The whole records in the last `end_bytes`, oldest first; none where there is no such file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - end_bytes)
            file.seek(begin)
            lines = file.read(size - begin).split(b"\n")
    except OSError:  # not there, or a stale handle of a network file system
        return []
    records = []
    for line in lines[1 if begin else 0 : -1]:  # the first may have lost its beginning, the last is not finished
        try:
            records.append(strict_json.decode(line))
        except ValueError:
            continue
    return records


class NewestOfEach:
    """The newest record of each file in a folder: of each rank, or each node. A file that did not grow stays closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[int, dict[str, Any]]] = {}

    def poll(self) -> list[dict[str, Any]]:
        try:
            with os.scandir(self._folder) as entries:
                sizes = {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(".jsonl")}
        except OSError:
            return []
        for name, size in sizes.items():
            if name not in self._known or self._known[name][0] != size:
                found = newest_records(self._folder / name)
                if found:
                    self._known[name] = (size, found[-1])
        return [self._known[name][1] for name in sorted(sizes) if name in self._known]
