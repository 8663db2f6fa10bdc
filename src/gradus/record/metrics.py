"""Reading metrics.jsonl: one row for each step, whole or as it grows.

Training and evaluation write their own lines. A line is of an evaluation when it has a key that starts with
`validation_`, or the key `evaluation`. For a repeated step the highest attempt wins, separately for the two kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
