"""What came of a run, in a few lines."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.format import bytes_text, duration_text, metric_text, number_text
from gradus.record.metrics import Evaluation, best_evaluation, epochs, evaluations, read_metrics, validation_results
from gradus.record.progress import speed_text
from gradus.record.status import read_status
from gradus.schema.errors import InputError
from gradus.schema.recipe import EvaluateBlock, Recipe

# Compilation, caches and allocator growth: not what the run's speed is.
_WARM_UP_ROWS = 3
_ATTEMPT = re.compile(r"attempt-(\d+)$")


@dataclass(frozen=True)
class Summary:
    """The numbers of a run; None is what was not recorded."""

    step: int
    first_loss: float | None
    last_loss: float | None
    validation: dict[str, float]
    """Loss and metrics of the last evaluation that had them, by name."""
    epoch: dict[str, Any] | None
    """The last pass over the data that ended: its number, mean loss and speed."""
    metric: str
    """The one by which the recipe judges evaluations."""
    best: Evaluation | None
    evaluations: int
    tokens_per_second: float | None
    samples_per_second: float | None
    memory_peak_bytes: int | None
    mfu: str | None
    """With its formula and the peak that it is a part of."""
    wall_seconds: float | None
    """Of all attempts together, each from its first event to its last: waits between them do not count."""


def summarize(run: RunDirectory) -> Summary:
    rows = read_metrics(run)
    losses, memory = _column(rows, "loss"), _column(rows, "memory_peak_bytes")
    judged_by = evaluate_block(run)
    judged = evaluations(rows, judged_by.metric)
    passes = epochs(rows)
    return Summary(
        step=rows[-1]["step"] if rows else 0,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        validation={name: value for row in rows for name, value in validation_results(row).items()},
        epoch=passes[-1] if passes else None,
        metric=judged_by.metric,
        best=best_evaluation(judged, judged_by),
        evaluations=len(judged),
        tokens_per_second=_usual(rows, "tokens_per_second"),
        samples_per_second=_usual(rows, "samples_per_second"),
        memory_peak_bytes=max(memory) if memory else None,
        mfu=_mfu_text(run, _usual(rows, "mfu")),
        wall_seconds=_wall_seconds(run),
    )


def summary_text(run: RunDirectory, next_steps: Sequence[str] = ()) -> str:
    """The summary as people read it, ending in what to try next."""
    found = summarize(run)
    speed = speed_text(found.tokens_per_second, found.samples_per_second)
    lines: list[tuple[str, str]] = []
    if found.first_loss is not None and found.last_loss is not None:
        lines.append(("loss", f"{number_text(found.first_loss)} → {number_text(found.last_loss)}"))
    if found.epoch is not None and found.epoch["loss"] is not None:
        its_speed = speed_text(found.epoch["tokens_per_second"], found.epoch["samples_per_second"])
        mean = f"mean loss {number_text(found.epoch['loss'])}"
        lines.append((f"epoch {found.epoch['epoch']}", f"{mean}, {its_speed}" if its_speed else mean))
    for name, value in found.validation.items():
        best = _best_text(found) if name == found.metric else ""
        lines.append((f"validation {name}", f"{metric_text(name, value)}{best}"))
    if speed:
        lines.append(("speed", f"{speed} (median)"))
    if found.mfu:
        lines.append(("MFU", found.mfu))
    if found.memory_peak_bytes:
        lines.append(("peak memory", f"{bytes_text(found.memory_peak_bytes)} on rank 0"))
    time_text = f" in {duration_text(found.wall_seconds)}" if found.wall_seconds is not None else ""
    status = read_status(run)
    total = status.steps_total if status else None
    of_total = f" of {total}" if total is not None and found.step < total else ""
    counted = found.step or total is not None or not _is_of_a_script(run)
    steps = f"{found.step}{of_total}{time_text}" if counted else f"–{time_text} (those of a script are not counted)"
    lines += [("steps", steps), ("run", str(run.path))]
    width = max(len(label) for label, _ in lines)
    text = [f"{label:<{width}}  {value}" for label, value in lines]
    if next_steps:
        text += ["", "try next", *(f"  {line}" for line in next_steps)]
    return "\n".join(text)


def evaluate_block(run: RunDirectory) -> EvaluateBlock:
    """How the newest attempt judges evaluations. A run of a foreign script has no recipe, and so the usual way."""
    path = run.attempt_path(max(run.attempts, default=0)) / "recipe.yaml"
    try:
        return Recipe.load(path).evaluate
    except InputError:
        return EvaluateBlock()


def _is_of_a_script(run: RunDirectory) -> bool:
    return bool(run.attempts) and not (run.attempt_path(max(run.attempts)) / "recipe.yaml").exists()


def _best_text(found: Summary) -> str:
    """Nothing where there is nothing to compare."""
    if found.best is None or found.evaluations < 2:
        return ""
    return f" (best {metric_text(found.metric, found.best.value)} at step {found.best.step})"


def _column(rows: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows if row.get(key) is not None]


def _usual(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    values = _column(rows, key)
    return statistics.median(values[_WARM_UP_ROWS:] or values) if values else None


def _mfu_text(run: RunDirectory, mfu: float | None) -> str | None:
    start = next((event for event in reversed(read_events(run)) if event.get("peak_flops")), None)
    if mfu is None or start is None:
        return None
    peak = f"{start['peak_flops'] / 1e12:,.0f} TFLOP/s ({start['peak_source']})"
    return f"{mfu:.1%} = {start['flops_per_sample']:.3g} FLOPs per sample × samples/s ÷ {peak}"


def _wall_seconds(run: RunDirectory) -> float | None:
    times: dict[str, list[datetime]] = {}
    for event in read_events(run):
        if "time" in event:
            attempt = _ATTEMPT.search(str(event.get("writer")))  # writers are called after the attempt they belong to
            times.setdefault(attempt[1] if attempt else "", []).append(datetime.fromisoformat(event["time"]))
    spans = [(of_one[-1] - of_one[0]).total_seconds() for of_one in times.values() if len(of_one) > 1]
    return sum(spans) if spans else None
