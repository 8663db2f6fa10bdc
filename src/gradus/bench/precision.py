"""Precision: the same recipe, seed and data in each number format: how fast, how much memory, and what becomes of the
loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from gradus.bench.result import BenchResult, bench_environment, finite
from gradus.bench.tried import Ranks, Repeated, Trial, Tried, host_memory_for, interleaved, memory_notes, repeated
from gradus.bench.tried_recipe import why_not
from gradus.record.chart import Bars, Chart, Series
from gradus.record.format import rate_text
from gradus.schema.cluster import Cluster
from gradus.schema.plan import Plan, Precision
from gradus.schema.recipe import Recipe

PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16", "bf16", "fp8")
_LAST_SHARE = 0.2  # of the steps, whose mean loss is compared: single steps differ by their samples


def precision(
    recipe: Recipe,
    plan: Plan,
    cluster: Cluster,
    precisions: Sequence[Precision],
    *,
    steps: int,
    repeats: int,
    say: Callable[[str], None],
    limit_seconds: float = 300.0,
) -> BenchResult:
    """Each precision so often, in turns. Those that this device does not have are refused, with the reason."""
    world = plan.mesh.world_size
    trials: dict[str, Trial] = {}
    found: list[tuple[str, Tried]] = []
    for name in precisions:
        tried = plan.model_copy(update={"precision": name})
        reason = why_not(recipe, cluster, tried)
        if reason is not None:
            found.append((name, Tried("refused", reason)))  # told once, below the table
            continue
        memory = None if cluster.gpus_per_node else host_memory_for(world)
        trials[name] = Trial(
            recipe, tried, steps=steps, whole=True, limit_seconds=limit_seconds, host_memory_bytes=memory
        )
    with Ranks(world) as ranks:
        for label, tried_out in interleaved(ranks, trials, repeats):
            found.append((label, tried_out))
            rate = tried_out.samples_per_second
            say(f"{label}: {rate_text(rate, 'samples') if rate else tried_out.why}")
    return _result(recipe, plan, steps, repeats, repeated(found), precisions)


def _result(
    recipe: Recipe, plan: Plan, steps: int, repeats: int, found: dict[str, Repeated], order: Sequence[str]
) -> BenchResult:
    base_name = next((name for name in order if found[name].measured), None)
    base = found[base_name] if base_name is not None else None
    rows = [_row(name, found[name], base) for name in order]
    measured = [row for row in rows if row["state"] == "measured"]
    device = next((tried.device for each in found.values() for tried in each.tries if tried.device), "")
    curves = tuple(
        Series(name, list(range(1, len(found[name].losses) + 1)), [finite(loss) for loss in found[name].losses])
        for name in order
        if found[name].measured
    )
    return BenchResult(
        kind="precision",
        title=f"Precision: {recipe.name} on {device or 'this machine'}",
        settings={
            "recipe": recipe.name,
            "batch": recipe.batch,
            "steps": steps,
            "repeats": repeats,
            "ranks": plan.mesh.world_size,
            "compile": plan.compile,
            "channels_last": plan.channels_last,
            "device": device,
        },
        rows=rows,
        summary={"baseline": base_name, "fastest": _fastest(measured)},
        charts=(
            Bars(
                "Speed",
                "samples/s",
                tuple((row["precision"], (("samples/s", row["samples_per_second"]),)) for row in measured),
            ),
            Bars(
                "Peak memory of a rank",
                "GiB",
                tuple((row["precision"], (("GiB", row["memory_bytes"] / 2**30),)) for row in measured),
            ),
            Chart("Loss, same seed and samples", "step", "training loss", curves),
        ),
        environment=bench_environment(),
        notes=(*memory_notes(device), *(f"{row['precision']}: {row['why']}" for row in rows if row["why"])),
    )


def _row(name: str, found: Repeated, base: Repeated | None) -> dict[str, Any]:
    failure = found.failure
    row: dict[str, Any] = {
        "precision": name,
        "state": failure.state if failure else "measured",
        "samples_per_second": found.samples_per_second,
        "spread": found.spread if found.measured else None,
        "speed_up": None,
        "memory_bytes": found.memory_bytes,
        "memory_ratio": None,
        "loss": _loss(found),
        "loss_gap": None,
        "why": failure.why if failure else "",
    }
    if base is not None and found.measured:
        assert found.samples_per_second is not None
        assert base.samples_per_second is not None
        row["speed_up"] = found.samples_per_second / base.samples_per_second
        if found.memory_bytes is not None and base.memory_bytes:
            row["memory_ratio"] = found.memory_bytes / base.memory_bytes
        here, there = _loss(found), _loss(base)
        if here is not None and there:
            row["loss_gap"] = here / there - 1
    return row


def _loss(found: Repeated) -> float | None:
    """The mean of the last steps; None where it is no number any more."""
    losses = found.losses
    return finite(statistics.fmean(losses[-max(1, round(len(losses) * _LAST_SHARE)) :])) if losses else None


def _fastest(rows: list[dict[str, Any]]) -> str | None:
    return max(rows, key=lambda row: row["samples_per_second"])["precision"] if rows else None
