"""Loader: how fast a recipe's own data pipeline delivers, by number of workers and by size of the micro-batch.

Nothing is trained, so this is the most that a step can be fed with. Workers are real processes, as in a run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradus.bench.interleaved import Spread
from gradus.bench.result import BenchResult, bench_environment
from gradus.data.loader import Indexed, Loader, Slices
from gradus.data.orders import order_for
from gradus.hardware.cluster import detect_cluster
from gradus.hardware.rank_cores import cores_of_rank
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import prepare_data, resolved
from gradus.record.chart import Chart, Series
from gradus.record.format import count_text, duration_text
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe
from gradus.training.building import open_data
from gradus.training.device import rank_device
from gradus.training.precision import numbers_for

WORKERS = (0, 2, 4, 8)
_HELPS = 1.05  # times as fast at least, or more workers bring nothing
_TRIED_IN_VAIN = 2  # numbers of workers in a row that bring nothing, before larger ones are not tried
_MANY = 10**9  # samples: the stream goes on across epochs
_IN_ADVANCE = 2  # micro-batches of each worker that are ready by the time of the first; they are not counted


@dataclass(frozen=True)
class Delivered:
    """One pass: how long the first micro-batch took, workers' start included, and the rate afterwards."""

    first_batch_seconds: float
    samples_per_second: float


@dataclass(frozen=True)
class Row:
    micro_batch: int
    workers: int
    samples_per_second: float | None  # None: not tried, since more workers had stopped helping
    spread: float | None
    first_batch_seconds: float | None
    repeats: int


def bench_loader(
    recipe: Recipe,
    workers: Sequence[int] | None = None,
    micro_batches: Sequence[int] | None = None,
    *,
    seconds: float = 2.0,
    rounds: int = 3,
    helps: float = _HELPS,
    say: Callable[[str], None] = lambda line: None,
) -> BenchResult:
    """The numbers of workers that were asked for; else `WORKERS`, as far as more of them are faster.

    They are if the rate is at least `helps` times the best of fewer.
    """
    recipe = resolved(recipe)
    prepare_data(recipe)
    plan = default_plan(recipe, detect_cluster(), 1).plan
    device = rank_device(0)
    data = open_data(recipe, "train")
    if data is None:
        raise InputError("data.use: there are no training samples", field="data.use", found=0, allowed=">= 1")
    sizes = tuple(micro_batches or _around(plan.micro_batch, data.length))
    counts = tuple(sorted(set(workers or WORKERS)))

    def passed(size: int, count: int) -> Delivered:
        found = delivered(_loader(recipe, plan, data, device, size, count), seconds)
        say(f"micro-batch {size}, {count_text(count, 'worker')}: {found.samples_per_second:,.0f} samples/s")
        return found

    measurements = len(sizes) * len(counts) * rounds
    say(f"at most {measurements} × {seconds:g} s = {duration_text(measurements * seconds)}, and the start of workers")
    # The first round finds out how far more workers help; the others repeat what it has kept, in turn.
    kept: dict[tuple[int, int], list[Delivered]] = {}
    for size in sizes:
        best, in_vain = 0.0, 0
        for count in counts:
            if workers is None and in_vain == _TRIED_IN_VAIN:
                break
            first = passed(size, count)
            kept[size, count] = [first]
            in_vain = 0 if first.samples_per_second >= helps * best else in_vain + 1
            best = max(best, first.samples_per_second)
    for number in range(1, rounds):
        for size, count in kept if number % 2 == 0 else reversed(list(kept)):
            kept[size, count].append(passed(size, count))
    rows = [_row(size, count, kept.get((size, count), [])) for size in sizes for count in counts]
    chosen, reason = _of_the_plan(recipe, plan, data, device)
    return BenchResult(
        "loader",
        f"Loading of {recipe.name}",
        {
            "recipe": recipe.name,
            "data": recipe.data.use,
            "workers": list(counts),
            "micro_batches": list(sizes),
            "rounds": rounds,
            "seconds": seconds,
            "cores": cores_of_rank(1),
            "device": device.type,
        },
        [asdict(row) for row in rows],
        {
            **_best(rows, plan.micro_batch),
            "plan_micro_batch": plan.micro_batch,
            "plan_workers": chosen,
            "plan_workers_reason": reason,
        },
        (_chart(rows, sizes),),
        bench_environment(),
        notes=("Files that were read before are in the page cache; gradus bench storage looks at the disk itself.",),
    )


def delivered(loader: Loader, seconds: float) -> Delivered:
    """Take micro-batches as fast as they come, for so long after those that were ready in advance."""
    batches = loader.micro_batches(0, _MANY // loader.slices.batch)
    try:
        begun = time.perf_counter()
        next(batches)
        first = time.perf_counter() - begun
        for _ in itertools.islice(batches, _IN_ADVANCE * loader.workers):
            pass
        samples, begun = 0, time.perf_counter()
        while True:
            samples += next(batches).samples
            elapsed = time.perf_counter() - begun
            if elapsed >= seconds:
                return Delivered(first, samples / elapsed)
    finally:
        batches.close()  # type: ignore[attr-defined]


def _loader(
    recipe: Recipe, plan: Plan, data: Indexed, device: torch.device, size: int, workers: int, *, on_device: bool = False
) -> Loader:
    return Loader(
        data,
        Slices(size, size, 1, 0, _MANY),
        device,
        numbers_for(plan.precision, device).parameters,
        seed=recipe.seed,
        order=order_for(data, recipe.data, recipe.seed, size),
        workers=workers,
        on_device=on_device,
        channels_last=plan.channels_last,
    )


def _of_the_plan(recipe: Recipe, plan: Plan, data: Indexed, device: torch.device) -> tuple[int | None, str]:
    """How many workers a run would have, and why."""
    loader = _loader(recipe, plan, data, device, plan.micro_batch, 0, on_device=plan.data_on_device)
    chosen = loader.choose_workers(0, cores_of_rank(1))
    if chosen is None:
        return 0, "the data is small and lives on the device, where a run picks its samples"
    if isinstance(plan.workers, int):
        return plan.workers, f"plan.workers; measured now, auto would be {chosen.reason}"
    return chosen.workers, chosen.reason


def _around(micro_batch: int, samples: int) -> tuple[int, ...]:
    sizes = (max(1, micro_batch // 2), micro_batch, 2 * micro_batch)
    return tuple(dict.fromkeys(size for size in sizes if size <= samples)) or (micro_batch,)


def _row(size: int, count: int, found: Sequence[Delivered]) -> Row:
    if not found:
        return Row(size, count, None, None, None, 0)
    rates = Spread(tuple(one.samples_per_second for one in found))
    first = Spread(tuple(one.first_batch_seconds for one in found))
    return Row(size, count, rates.median, rates.relative, first.median, len(found))


def _best(rows: Sequence[Row], micro_batch: int) -> dict[str, Any]:
    """The fewest workers that are nearly as fast as the best, for the plan's micro-batch or the one nearest to it."""
    size = min({row.micro_batch for row in rows}, key=lambda one: abs(one - micro_batch))
    found = [row for row in rows if row.micro_batch == size and row.samples_per_second is not None]
    most = max(row.samples_per_second or 0.0 for row in found)
    best = next(row for row in found if (row.samples_per_second or 0.0) * _HELPS >= most)
    return {"micro_batch": size, "best_workers": best.workers, "samples_per_second": best.samples_per_second}


def _chart(rows: Sequence[Row], sizes: Sequence[int]) -> Chart:
    series = tuple(
        Series(
            f"micro-batch {size}",
            [float(row.workers) for row in rows if row.micro_batch == size],
            [row.samples_per_second for row in rows if row.micro_batch == size],
        )
        for size in sizes
    )
    return Chart("Samples by workers", "loader workers", "samples/s", series, from_zero=True, points=True)
