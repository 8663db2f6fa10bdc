"""Replicas: several processes on one GPU, against one. A small model leaves much of a GPU idle (AccDP of the OSU team).

Without MPS the processes take turns on the GPU; with it, their kernels run at once. On a CPU they share its cores.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from gradus.bench.interleaved import Spread, interleaved
from gradus.bench.mps import mps
from gradus.bench.ranks import check_one_machine
from gradus.bench.result import BenchResult, bench_environment
from gradus.bench.synthetic import Synthetic, trained
from gradus.hardware.detect import detect_machine
from gradus.planner.resolve import prepare_data, resolved
from gradus.record.chart import Chart, Series
from gradus.schema.errors import GradusError
from gradus.schema.recipe import Recipe

IN_TURNS, WITH_MPS, ON_CORES = "taking turns", "MPS", "sharing cores"


@dataclass(frozen=True)
class Row:
    replicas: int
    how: str
    samples_per_second: float  # of all together
    spread: float | None
    against_one: float  # times as fast as one process
    memory_peak_bytes_each: int | None


@dataclass(frozen=True)
class RecipeSteps:
    """A recipe in place of a model on random data."""

    recipe: Recipe
    warm_up: int = 5
    batches: int = 5
    iterations: int = 5

    def asked(self, folder: str) -> dict[str, Any]:
        return {
            "recipe": self.recipe.model_dump(mode="json", exclude_unset=True),
            "folder": folder,
            "warm_up": self.warm_up,
            "batches": self.batches,
            "iterations": self.iterations,
        }


def bench_replicas(
    work: Synthetic | RecipeSteps,
    counts: Sequence[int],
    rounds: int,
    *,
    averaged: bool = False,
    use_mps: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> BenchResult:
    """`averaged`: they train one model together, over gloo, as AccDP's do; else each has its own."""
    check_one_machine("bench replicas")
    if isinstance(work, Synthetic):
        work.check()
    else:
        work = replace(work, recipe=resolved(work.recipe))
        prepare_data(work.recipe)  # once, and not in each of the processes
    gpus = len(detect_machine().gpus)
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        asked = work.asked(averaged=averaged) if isinstance(work, Synthetic) else work.asked(folder)
        services: dict[str, Mapping[str, str]] = {IN_TURNS if gpus else ON_CORES: {}}
        if gpus and use_mps:
            service = stack.enter_context(mps())
            if isinstance(service, str):
                notes.append(f"MPS was not measured: {service}.")
            elif (problem := _cannot(asked, service)) is not None:
                notes.append(f"MPS was not measured: a process that uses it fails: {problem}.")
            else:
                services[WITH_MPS] = service
        peaks: dict[tuple[int, str], int | None] = {}
        unit: list[str] = []

        def once(count: int, how: str) -> float:
            found = trained({**asked, "ranks_per_gpu": count}, count, variables=services[how])
            assert found is not None
            peaks[count, how] = found.memory_peak_bytes
            unit[:] = [found.place["unit"]]
            rate = Spread(found.totals).median
            say(f"{count} {'process' if count == 1 else 'processes'}, {how}: {rate:,.1f} {unit[0]}/sec")
            return rate

        first = next(iter(services))
        variants = {
            (count, how): partial(once, count, how)
            for count in counts
            for how in services
            if count > 1 or how == first  # one process has nobody to share with
        }
        spreads = interleaved(variants, rounds)
    base = spreads[1, first].median
    rows = [
        Row(count, how, spread.median, spread.relative, spread.median / base, peaks[count, how])
        for (count, how), spread in spreads.items()
    ]
    name = work.model if isinstance(work, Synthetic) else work.recipe.name
    settings = {key: value for key, value in asked.items() if key not in ("recipe", "folder")}
    best = max(rows, key=lambda row: row.samples_per_second)
    return BenchResult(
        "replicas",
        f"Replicas of {name} on one {'GPU' if gpus else 'CPU'}",
        {**settings, "name": name, "averaged": averaged, "rounds": rounds, "unit": unit[0]},
        [asdict(row) for row in rows],
        {
            "best_replicas": best.replicas,
            "best_how": best.how,
            "samples_per_second": best.samples_per_second,
            "against_one": best.against_one,
        },
        (_chart(rows, list(services), unit[0]),),
        bench_environment(),
        notes=tuple(notes),
    )


def _cannot(asked: Mapping[str, Any], service: Mapping[str, str]) -> str | None:
    """Why a process cannot use the service, if so: a container may not let it."""
    try:
        trained({**asked, "warm_up": 0, "batches": 1, "iterations": 1}, 1, variables=service)
    except GradusError as error:
        said = str(error.details.get("output") or error.message).strip().splitlines()
        return said[-1][:160] if said else "no reason given"
    return None


def _chart(rows: Sequence[Row], ways: Sequence[str], unit: str) -> Chart:
    one = rows[0]
    series = []
    for how in ways:
        found = [row for row in rows if row.how == how or row is one]
        series.append(Series(how, [float(row.replicas) for row in found], [row.samples_per_second for row in found]))
    return Chart("All processes together", "processes", f"{unit}/sec", tuple(series), from_zero=True, points=True)
