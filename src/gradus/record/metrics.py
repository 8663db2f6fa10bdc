"""Reading metrics.jsonl: one row for each step, whole or as it grows.

Training and evaluation write their own lines. A line is of an evaluation when it has a key that starts with
`validation_`, or the key `evaluation`. An attempt that goes on from a checkpoint discards what earlier attempts did
after it: their lines at or after its first one are no part of the run any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gradus.record.append_log import read_lines
from gradus.record.directory import RunDirectory


def is_evaluation(record: Mapping[str, Any]) -> bool:
    return any(key == "evaluation" or key.startswith("validation_") for key in record)


def position(record: Mapping[str, Any]) -> tuple[int, bool]:
    """Where in a run a record is: an evaluation comes after the training of its step."""
    return record["step"], is_evaluation(record)


def read_metrics(run: RunDirectory) -> list[dict[str, Any]]:
    """One row for each logged step, ascending, with the evaluation of that step merged in."""
    return merge_by_step(read_lines(run.metrics_path).records)


def merge_by_step(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_attempt: dict[int, dict[tuple[int, bool], Mapping[str, Any]]] = {}
    for record in records:
        if "step" in record:
            by_attempt.setdefault(record.get("attempt", 0), {})[position(record)] = record
    kept: dict[tuple[int, bool], Mapping[str, Any]] = {}
    for _, logged in sorted(by_attempt.items()):
        first = min(logged)
        kept = {at: record for at, record in kept.items() if at < first} | logged
    steps = sorted({step for step, _ in kept})
    # Training last, so that the row carries the attempt that trained the step.
    return [{**kept.get((step, True), {}), **kept.get((step, False), {})} for step in steps]
