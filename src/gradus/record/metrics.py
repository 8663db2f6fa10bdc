"""Reading metrics.jsonl: one row for each step, whole or as it grows.

Training, the end of an epoch and evaluation write their own lines. A line is of an evaluation when it has a key that
starts with `validation_`, or the key `evaluation`. An attempt that goes on from a checkpoint discards what earlier
attempts did after it: their lines at or after its first one are no part of the run any more. Nor are, after a line
`rolled_back_to`, those of its own attempt about later steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gradus.record.append_log import read_lines
from gradus.record.directory import RunDirectory
from gradus.schema.recipe import EvaluateBlock

VALIDATION = "validation_"
EPOCH_NUMBERS = ("loss", "samples_per_second", "tokens_per_second")  # with `epoch_` before them in the file


class Evaluation(NamedTuple):
    """The value of one metric at one step."""

    step: int
    value: float


def is_evaluation(record: Mapping[str, Any]) -> bool:
    return any(key == "evaluation" or key.startswith(VALIDATION) for key in record)


def validation_results(record: Mapping[str, Any]) -> dict[str, float]:
    """Loss and metrics of an evaluation by their names in the recipe, the loss first."""
    found = {k.removeprefix(VALIDATION): v for k, v in record.items() if k.startswith(VALIDATION) and v is not None}
    return {name: found[name] for name in sorted(found, key=lambda name: name != "loss")}


def evaluations(rows: Iterable[Mapping[str, Any]], metric: str) -> list[Evaluation]:
    """All evaluations of a metric, ascending."""
    key = VALIDATION + metric
    return [Evaluation(row["step"], row[key]) for row in rows if row.get(key) is not None]


def epochs(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each pass over the data: its number, the step that ended it, its mean loss and its speed."""
    return [
        {"epoch": row["epoch"], "step": row["step"], **{name: row.get(f"epoch_{name}") for name in EPOCH_NUMBERS}}
        for row in rows
        if row.get("epoch") is not None
    ]


def best_evaluation(found: Iterable[Evaluation], block: EvaluateBlock) -> Evaluation | None:
    """The first of the best ones, as the recipe says what is better; the one that `checkpoint.best` keeps."""
    best: Evaluation | None = None
    for evaluation in found:
        if math.isfinite(evaluation.value) and (best is None or block.is_better(evaluation.value, best.value)):
            best = evaluation
    return best


def position(record: Mapping[str, Any]) -> tuple[int, bool]:
    """Where in a run a record is: an evaluation comes after the training of its step."""
    return record["step"], is_evaluation(record)


def read_metrics(run: RunDirectory) -> list[dict[str, Any]]:
    """One row for each logged step, ascending, with the evaluation of that step merged in."""
    return merge_by_step(read_lines(run.metrics_path).records)


def merge_by_step(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_attempt: dict[int, dict[tuple[int, bool], Mapping[str, Any]]] = {}
    for record in records:
        logged = by_attempt.setdefault(record.get("attempt", 0), {})
        if "rolled_back_to" in record:
            for at in [at for at in logged if at[0] > record["rolled_back_to"]]:
                del logged[at]
        if "step" in record:
            # Hooks and own loops write further numbers of a step in lines of their own.
            logged[position(record)] = {**logged.get(position(record), {}), **record}
    kept: dict[tuple[int, bool], Mapping[str, Any]] = {}
    for _, logged in sorted(by_attempt.items()):
        if not logged:
            continue
        first = min(logged)
        kept = {at: record for at, record in kept.items() if at < first} | logged
    steps = sorted({step for step, _ in kept})
    # Training last, so that the row carries the attempt that trained the step.
    return [{**kept.get((step, True), {}), **kept.get((step, False), {})} for step in steps]
