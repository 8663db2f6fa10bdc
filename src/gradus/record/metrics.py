"""Reading metrics.jsonl: one row for each step, whole or as it grows.

Training and evaluation write their own lines. A line is of an evaluation when it has a key that starts with
`validation_`, or the key `evaluation`. For a repeated step the highest attempt wins, separately for the two kinds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from gradus.record import strict_json
from gradus.record.append_log import read_lines
from gradus.record.directory import RunDirectory


def is_evaluation(record: Mapping[str, Any]) -> bool:
    return any(key == "evaluation" or key.startswith("validation_") for key in record)


def read_metrics(run: RunDirectory) -> list[dict[str, Any]]:
    """One row for each logged step, ascending, with the evaluation of that step merged in."""
    return merge_by_step(read_lines(run.metrics_path).records)


def merge_by_step(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    winners: dict[tuple[int, bool], Mapping[str, Any]] = {}
    for record in records:
        if "step" not in record:
            continue
        key = record["step"], is_evaluation(record)
        if record.get("attempt", 0) >= winners.get(key, {}).get("attempt", 0):
            winners[key] = record
    steps = sorted({step for step, _ in winners})
    # Training last, so that the row carries the attempt that trained the step.
    return [{**winners.get((step, True), {}), **winners.get((step, False), {})} for step in steps]


class MetricsTail:
    """Follows metrics.jsonl: each poll returns only the records added since the last one."""

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.metrics_path
        self._offset = 0

    def poll(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(self._offset)
                data = file.read(max(0, size - self._offset))
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1  # the rest of an unfinished line comes with a later poll
        self._offset += whole
        records = []
        for line in data[:whole].splitlines():
            try:
                records.append(strict_json.decode(line))
            except ValueError:
                continue  # read_lines counts broken lines; a live view has nobody to tell
        return records
