"""Knobs: what each of seven well-known methods does to speed and memory, measured on and off, beside what is claimed.

The claims are those of the table in Hugging Face's guide to training on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from gradus.bench.result import BenchResult, bench_environment
from gradus.bench.tried import (
    Ranks,
    Repeated,
    Trial,
    Tried,
    host_memory_for,
    interleaved,
    memory_notes,
    noise_between,
    repeated,
)
from gradus.bench.tried_recipe import why_not
from gradus.record.chart import Bars
from gradus.record.format import rate_text
from gradus.schema.cluster import Cluster
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import OptimizerBlock, Recipe

BASELINE = "baseline"
_MEMORY_COUNTS = 0.03  # a smaller difference is none
_WORKERS = 4


@dataclass(frozen=True)
class Knob:
    """A method, what it is compared with, and what is claimed of it: that it makes training faster, or smaller."""

    name: str
    does: str
    on: str  # the trial with it
    off: str  # and without
    faster: bool
    smaller: bool
    # Where a size is chosen, one choice is for speed and the other for memory.
    on_for_memory: str | None = None
    claim: str = ""


KNOBS = (
    Knob(
        "gradient accumulation", "the same batch in 4 parts, one after the other", "accumulation", BASELINE, False, True
    ),
    Knob(
        "gradient checkpointing", "activations are computed again in backward", "checkpointing", BASELINE, False, True
    ),
    Knob("mixed precision", "bf16 where fp32 is not needed", "mixed precision", BASELINE, True, False, claim="Y/(N)"),
    Knob(
        "batch size", "twice the batch for speed, half of it for memory", "batch × 2", BASELINE, True, True, "batch ÷ 2"
    ),
    Knob("optimizer choice", "plain SGD in place of AdamW", "sgd", BASELINE, True, True),
    Knob("DataLoader", f"{_WORKERS} worker processes in place of none", "workers", "no workers", True, False),
    Knob("ZeRO", "state shared by 2 ranks (zero 3) in place of 2 replicas", "zero", "replicas", False, True),
)


NAMES = tuple(knob.name for knob in KNOBS)


def trials_of(recipe: Recipe, cluster: Cluster, seconds: float, limit_seconds: float) -> dict[str, Trial]:
    """The plain baseline (one rank, fp32, AdamW), and one change at a time."""
    gpus = cluster.gpus_per_node
    shared = {"ranks_per_gpu": 2} if gpus == 1 else {}
    adamw = _with(recipe, optimizer=OptimizerBlock(use="adamw", lr=recipe.optimizer.lr, clip=recipe.optimizer.clip))
    # Data that fits is on the device, so that a row does not measure how it is loaded; the one about loading does.
    plain = Plan(micro_batch=recipe.batch, workers=max(0, min(_WORKERS, cluster.cpu_cores - 1)))
    loaded = {"data_on_device": False}
    two = plain.model_copy(update={"mesh": Mesh(replicate=2), "micro_batch": recipe.batch // 2, **shared})
    sharded = {"mesh": Mesh(shard=2), "zero": 3}
    changes: dict[str, tuple[Recipe, Plan]] = {
        BASELINE: (adamw, plain),
        "accumulation": (adamw, plain.model_copy(update={"micro_batch": recipe.batch // 4, "accumulate": 4})),
        "checkpointing": (adamw, plain.model_copy(update={"recompute": "full"})),
        "mixed precision": (adamw, plain.model_copy(update={"precision": "bf16"})),
        "batch × 2": (
            _with(adamw, batch=recipe.batch * 2),
            plain.model_copy(update={"micro_batch": recipe.batch * 2}),
        ),
        "batch ÷ 2": (
            _with(adamw, batch=recipe.batch // 2),
            plain.model_copy(update={"micro_batch": recipe.batch // 2}),
        ),
        "sgd": (_with(adamw, optimizer=OptimizerBlock(use="sgd", lr=recipe.optimizer.lr)), plain),
        "workers": (adamw, plain.model_copy(update={"workers": _WORKERS, **loaded})),
        "no workers": (adamw, plain.model_copy(update={"workers": 0, **loaded})),
        "replicas": (adamw, two),
        "zero": (adamw, two.model_copy(update=sharded)),
    }
    return {
        name: Trial(
            changed,
            plan,
            seconds=seconds,
            limit_seconds=limit_seconds,
            host_memory_bytes=None if gpus else host_memory_for(plan.mesh.world_size),
        )
        for name, (changed, plan) in changes.items()
    }


def knobs(
    recipe: Recipe,
    cluster: Cluster,
    *,
    repeats: int,
    seconds: float,
    say: Callable[[str], None],
    limit_seconds: float = 300.0,
    only: tuple[str, ...] = NAMES,
) -> BenchResult:
    """All of them in turns, so that what changes on the machine meanwhile changes for all."""
    chosen = [knob for knob in KNOBS if knob.name in only]
    wanted = {name for knob in chosen for name in (knob.on, knob.off, knob.on_for_memory) if name}
    trials = {n: t for n, t in trials_of(recipe, cluster, seconds, limit_seconds).items() if n in wanted}
    found: list[tuple[str, Tried]] = []
    for name, trial in list(trials.items()):
        reason = why_not(trial.recipe, cluster, trial.plan)
        if reason is not None:
            found.append((name, Tried("refused", reason)))
            say(f"{name}: {reason}")
            del trials[name]
    with ExitStack() as stack:
        worlds = sorted({trial.plan.mesh.world_size for trial in trials.values()})
        ranks = {world: stack.enter_context(Ranks(world)) for world in worlds}
        for name, tried in interleaved(ranks, trials, repeats):
            found.append((name, tried))
            rate = tried.samples_per_second
            say(f"{name}: {rate_text(rate, 'samples') if rate else f'{tried.state}: {tried.why}'}")
    return _result(recipe, repeats, repeated(found), chosen)


def _with(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update=changes)


def _result(recipe: Recipe, repeats: int, found: Mapping[str, Repeated], chosen: list[Knob]) -> BenchResult:
    rows = [_row(knob, found) for knob in chosen]
    measured = [row for row in rows if row["speed_ratio"] is not None]
    device = next((tried.device for each in found.values() for tried in each.tries if tried.device), "")
    trials = {
        name: {
            "samples_per_second": each.samples_per_second,
            "spread": each.spread if each.measured else None,
            "memory_bytes": each.memory_bytes,
            "why": each.failure.why if each.failure else None,
        }
        for name, each in found.items()
    }
    return BenchResult(
        kind="knobs",
        title=f"Speed and memory, knob by knob: {recipe.name} on {device or 'this machine'}",
        settings={"recipe": recipe.name, "batch": recipe.batch, "repeats": repeats, "device": device},
        rows=rows,
        summary={
            "trials": trials,
            "as_claimed": f"{sum(row['as_claimed'] is True for row in rows)} of {len(measured)} measured",
        },
        charts=(
            Bars(
                "Speed with it, over without",
                "×",
                tuple((row["knob"], (("speed", row["speed_ratio"]),)) for row in measured),
                note="above 1: faster",
            ),
            Bars(
                "Memory with it, over without",
                "×",
                tuple(
                    (row["knob"], (("memory", row["memory_ratio"]),))
                    for row in measured
                    if row["memory_ratio"] is not None
                ),
                note="below 1: smaller",
            ),
        ),
        environment=bench_environment(),
        notes=(
            "the baseline is one rank, fp32, AdamW, one micro-batch, data on the device if it fits; ZeRO is compared "
            "with 2 replicas, DataLoader without data on the device",
            *memory_notes(device),
            *(f"{row['knob']}: {row['why']}" for row in rows if row["why"]),
        ),
    )


def _row(knob: Knob, found: Mapping[str, Repeated]) -> dict[str, Any]:
    on, off = found[knob.on], found[knob.off]
    for_memory = found[knob.on_for_memory] if knob.on_for_memory else on
    failure = next((each.failure for each in (on, off, for_memory) if each.failure is not None), None)
    claim = knob.claim or f"{_word(knob.faster)}/{_word(knob.smaller)}"
    row: dict[str, Any] = {
        "knob": knob.name,
        "does": knob.does,
        "speed_ratio": None,
        "noise": None,
        "memory_ratio": None,
        "faster": None,
        "smaller": None,
        "claim": claim,
        "as_claimed": None,
        "why": f"{failure.state}: {failure.why}" if failure else "",
    }
    if failure is not None:
        return row
    assert on.samples_per_second is not None
    assert off.samples_per_second is not None
    speed, noise = on.samples_per_second / off.samples_per_second, noise_between(on, off)
    known = for_memory.memory_bytes is not None and off.memory_bytes
    memory = for_memory.memory_bytes / off.memory_bytes if known else None  # type: ignore[operator]
    faster, smaller = speed > 1 + noise, memory is not None and memory < 1 - _MEMORY_COUNTS
    return {
        **row,
        "speed_ratio": speed,
        "noise": noise,
        "memory_ratio": memory,
        "faster": faster,
        "smaller": smaller,
        # "(N)" is a claim with reservations, and holds either way.
        "as_claimed": faster == knob.faster and (smaller == knob.smaller or "(N)" in claim),
    }


def _word(claimed: bool) -> str:
    return "Y" if claimed else "N"
