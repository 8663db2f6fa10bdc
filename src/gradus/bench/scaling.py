"""Scaling: what more ranks bring. Measured here, with a model on random data or with a recipe; or read from logs.

`weak` gives every rank the same work and grows the batch, as the OSU lab does; `strong` divides one batch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gradus.bench.interleaved import Spread, interleaved
from gradus.bench.lab_lines import CONFIDENCE, read_log
from gradus.bench.ranks import check_one_machine
from gradus.bench.result import BenchResult, bench_environment
from gradus.bench.synthetic import Synthetic, trained
from gradus.hardware.detect import detect_machine
from gradus.launcher.launching import train
from gradus.record.amdahl import Amdahl, Measured, amdahl, efficiency, fraction_of, outside_the_law, speed_up
from gradus.record.chart import Chart, Series
from gradus.record.format import count_text
from gradus.record.metrics import read_metrics
from gradus.schema.errors import GradusError, InputError
from gradus.schema.recipe import Recipe

Mode = Literal["weak", "strong"]
PROCESSES, DATA_PARALLEL = "processes", "nn.DataParallel"
_WARM_UP_STEPS = 3  # of a recipe's run, in which kernels are chosen and the loader fills up
_NEVER = 10**9


@dataclass(frozen=True)
class Point:
    """So many ranks, and what they did in a second."""

    ranks: int
    how: str  # PROCESSES or DATA_PARALLEL
    rate: float
    plus_minus: float | None  # half of the interval that nearly all measurements lie in
    repeats: int

    @property
    def measured(self) -> Measured:
        error = None if self.plus_minus is None else self.plus_minus / CONFIDENCE
        return Measured(self.ranks, self.rate, error)


@dataclass(frozen=True)
class Row:
    """A line of the table. Speed-up and efficiency are against the fewest ranks that were measured."""

    ranks: int
    how: str
    samples_per_second: float
    plus_minus: float | None
    repeats: int
    speed_up: float
    efficiency: float
    amdahl_fraction: float | None  # that this speed-up alone would mean; None without one rank, or outside the law


def rows_of(points: Sequence[Point]) -> list[Row]:
    by_size = sorted(points, key=lambda point: (point.how != PROCESSES, point.ranks))
    base = by_size[0]
    rows = []
    for point in by_size:
        times = speed_up(point.measured, base.measured)
        by_law = base.ranks == 1 < point.ranks and 1 <= times <= point.ranks
        fraction = fraction_of(times, point.ranks) if by_law else None
        share = efficiency(point.measured, base.measured)
        rows.append(Row(point.ranks, point.how, point.rate, point.plus_minus, point.repeats, times, share, fraction))
    return rows


def fitted(points: Sequence[Point]) -> Amdahl | None:
    """The law through all of them; None with fewer than two numbers of ranks, or where no law goes through them."""
    return amdahl(_processes(points))


def _processes(points: Sequence[Point]) -> list[Measured]:
    return [point.measured for point in points if point.how == PROCESSES]


def default_counts() -> tuple[int, ...]:
    """1, 2, 4, ... up to the GPUs, or without GPUs to the cores, but not more than 4 of these."""
    machine = detect_machine()
    most = len(machine.gpus) or min(4, machine.cpu_cores)
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return tuple(counts)


# --- from logs


def scaling_of_logs(paths: Sequence[str]) -> BenchResult:
    logs = [read_log(path) for path in paths]
    kinds = {(log.unit, log.device) for log in logs}
    if len(kinds) > 1:
        found = " and ".join(sorted(f"{unit}/sec per {device}" for unit, device in kinds))
        raise InputError(
            f"--log: found {found}, which cannot be compared", field="--log", found=found, allowed="one of them"
        )
    by_count: dict[int, list[tuple[float, float]]] = {}
    for log in logs:
        by_count.setdefault(log.devices, []).append((log.total, log.total_plus_minus))
    if len(by_count) < 2:
        raise InputError(
            f"--log: found logs of {next(iter(by_count))} {logs[0].device}(s) alone, allowed: of several numbers",
            hint="give one log of each: --log one.txt --log two.txt",
            field="--log",
            found=next(iter(by_count)),
        )
    points = []
    for count, found_rates in sorted(by_count.items()):
        middle = Spread(tuple(rate for rate, _ in found_rates)).median
        points.append(
            Point(count, PROCESSES, middle, max(plus_minus for _, plus_minus in found_rates), len(found_rates))
        )
    device = logs[0].device
    settings = {"logs": [Path(path).name for path in paths], "unit": logs[0].unit, "device": device}
    return _result(points, settings, f"Scaling over {device}s, from logs", provenance="quoted")


# --- measured here


def scaling_of_model(
    work: Synthetic,
    counts: Sequence[int],
    mode: Mode,
    rounds: int,
    say: Callable[[str], None] = lambda line: None,
) -> BenchResult:
    """Also with nn.DataParallel, one process for all GPUs, where there are several."""
    work.check()
    gpus = len(detect_machine().gpus)
    _check_counts(counts, gpus)
    unit: list[str] = ["img"]

    def once(ranks: int, how: str) -> float:
        each = _each(work.batch_size, ranks, mode)
        alone = how == DATA_PARALLEL
        here = replace(work, batch_size=each * ranks if alone else each)
        found = trained(
            here.asked(data_parallel=alone),
            1 if alone else ranks,
            variables={"CUDA_VISIBLE_DEVICES": _first_gpus(ranks)} if gpus else None,
        )
        assert found is not None
        unit[0] = found.place["unit"]
        rate = Spread(found.totals).median
        say(f"{count_text(ranks, 'rank') if not alone else f'{ranks} {how}'}: {rate:.1f} {unit[0]}/sec")
        return rate

    variants = {(count, PROCESSES): partial(once, count, PROCESSES) for count in counts}
    if gpus > 1:
        variants |= {
            (count, DATA_PARALLEL): partial(once, count, DATA_PARALLEL) for count in counts if 1 < count <= gpus
        }
    points = [_point(count, how, spread) for (count, how), spread in interleaved(variants, rounds).items()]
    settings = {**work.asked(), "mode": mode, "rounds": rounds, "unit": unit[0], "device": "GPU" if gpus else "CPU"}
    notes = () if gpus > 1 else ("nn.DataParallel was not measured: it needs several GPUs.",)
    return _result(points, settings, f"Scaling of {work.model}, {mode}", notes=(*notes, *_shared_cores(counts, gpus)))


def scaling_of_recipe(
    recipe: Recipe,
    counts: Sequence[int],
    mode: Mode,
    rounds: int,
    steps: int,
    say: Callable[[str], None] = lambda line: None,
) -> BenchResult:
    """The recipe's own runs, data and all, for so many steps each. Nothing of them is kept."""
    gpus = len(detect_machine().gpus)
    _check_counts(counts, gpus)

    def once(ranks: int) -> float:
        batch = recipe.batch * (ranks if mode == "weak" else 1)
        if batch % ranks:
            raise _indivisible(batch, ranks, "batch")
        rate = recipe_rate(recipe, ranks, batch, steps)
        say(f"{count_text(ranks, 'rank')}: {rate:.1f} samples/s")
        return rate

    spreads = interleaved({count: partial(once, count) for count in counts}, rounds)
    points = [_point(count, PROCESSES, spread) for count, spread in spreads.items()]
    settings = {"recipe": recipe.name, "batch": recipe.batch, "mode": mode, "rounds": rounds, "steps": steps}
    settings |= {"unit": "sample", "device": "GPU" if gpus else "CPU"}
    return _result(points, settings, f"Scaling of {recipe.name}, {mode}", notes=_shared_cores(counts, gpus))


def recipe_rate(recipe: Recipe, ranks: int, batch: int, steps: int) -> float:
    """Samples in a second of a real run that is thrown away."""
    changes = {"batch": batch, "steps": _WARM_UP_STEPS + steps, "epochs": None, "tokens": None, "log_every": 1}
    quiet: dict[str, Any] = {"hooks": [], "exporters": []}
    evaluate = recipe.evaluate.model_copy(update={"every": _NEVER, "batches": 1, "target": None, "stop_after": None})
    plan = recipe.plan.model_copy(update={"checkpoint_every": _NEVER})
    short = recipe.model_copy(update={**changes, **quiet, "evaluate": evaluate, "plan": plan})
    with tempfile.TemporaryDirectory() as folder:
        result = train(short, ranks, runs=folder, quiet=True)
        if result.error:
            error = dict(result.error)
            raise GradusError(
                f"{count_text(ranks, 'rank')}: {error.get('message')}",
                hint=error.get("hint"),
                output=error.get("traceback"),
            )
        rows = read_metrics(result.run)
        seconds = [float(row["step_seconds"]) for row in rows if row.get("step_seconds") is not None]
    timed = seconds[_WARM_UP_STEPS:]
    if not timed:
        raise GradusError(f"{count_text(ranks, 'rank')}: the run has no timed step")
    return batch * len(timed) / sum(timed)


def _point(ranks: int, how: str, spread: Spread) -> Point:
    plus_minus = None if spread.relative is None else (spread.highest - spread.lowest) / 2
    return Point(ranks, how, spread.median, plus_minus, len(spread.values))


def _each(batch: int, ranks: int, mode: Mode) -> int:
    if mode == "weak":
        return batch
    if batch % ranks:
        raise _indivisible(batch, ranks, "--batch-size")
    return batch // ranks


def _indivisible(batch: int, ranks: int, field: str) -> InputError:
    return InputError(
        f"{field}: found {batch}, which {ranks} ranks cannot divide evenly",
        hint="choose a multiple of the most ranks, or --mode weak",
        field=field,
        found=batch,
        allowed=f"a multiple of {ranks}",
    )


def _check_counts(counts: Sequence[int], gpus: int) -> None:
    check_one_machine("bench scaling")
    if gpus and max(counts) > gpus:
        raise InputError(
            f"--ranks: found {max(counts)}, but there are {gpus} GPUs here",
            hint="more ranks on one GPU: gradus bench replicas",
            field="--ranks",
            found=max(counts),
            allowed=gpus,
        )


def _shared_cores(counts: Sequence[int], gpus: int) -> tuple[str, ...]:
    if gpus:
        return ()
    cores = detect_machine().cpu_cores
    threads = os.environ.get("OMP_NUM_THREADS")
    said = f"with OMP_NUM_THREADS={threads}" if threads else "each with an even share of them"
    return (f"Ranks on {cores} CPU cores, {said}: one rank alone may use more cores than one of several.",)


def _first_gpus(count: int) -> str:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(number) for number in range(count)]
    return ",".join(names[:count])


def _result(
    points: Sequence[Point],
    settings: Mapping[str, Any],
    title: str,
    *,
    provenance: str = "measured",
    notes: tuple[str, ...] = (),
) -> BenchResult:
    rows = rows_of(points)
    law, outside = fitted(points), outside_the_law(_processes(points))
    most = max((row for row in rows if row.how == PROCESSES), key=lambda row: row.ranks)
    summary: dict[str, Any] = {
        "ranks": most.ranks,
        "baseline_ranks": rows[0].ranks,
        "speed_up": most.speed_up,
        "efficiency": most.efficiency,
        "amdahl_fraction": law.fraction if law else None,
        "amdahl_interval": [law.low, law.high] if law else None,
        "speed_up_limit": law.limit if law else None,
    }
    return BenchResult(
        "scaling",
        title,
        dict(settings),
        [asdict(row) for row in rows],
        summary,
        _charts(rows, law, str(settings["device"])),
        bench_environment(),
        provenance=provenance,
        notes=((f"No Amdahl fraction: {outside}.",) if outside else ()) + notes,
    )


def _charts(rows: Sequence[Row], law: Amdahl | None, device: str) -> tuple[Chart, ...]:
    base = rows[0].ranks
    counts = sorted({row.ranks for row in rows})
    of = {how: [row for row in rows if row.how == how] for how in dict.fromkeys(row.how for row in rows)}
    measured = tuple(
        Series(how, [float(row.ranks) for row in found], [row.speed_up for row in found]) for how, found in of.items()
    )
    ideal = Series("ideal", [float(count) for count in counts], [count / base for count in counts], dashed=True)
    series = [*measured, ideal]
    if law is not None:
        at_base = law.speed_up(base)
        expected = [law.speed_up(count) / at_base for count in counts]
        series.append(
            Series(f"Amdahl, fraction {law.fraction:.3f}", [float(count) for count in counts], expected, True)
        )
    label = f"{device}s"
    shares = tuple(
        Series(how, [float(row.ranks) for row in found], [100 * row.efficiency for row in found])
        for how, found in of.items()
    )
    against = f"against {count_text(base, device)}"
    return (
        Chart(
            "Speed-up",
            label,
            f"times as fast, {against}",
            tuple(series),
            log_x=True,
            log_y=True,
            points=True,
            x_is_log_2=True,
        ),
        Chart("Efficiency", label, "%", shares, log_x=True, from_zero=True, points=True, x_is_log_2=True),
    )
