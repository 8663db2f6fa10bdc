"""`gradus bench loader`: how many workers a recipe's data needs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradus.cli.bench_output import HtmlOption, SaveOption, numbers_of, progress, run_bench
from gradus.cli.options import JsonOption, SetOption

if TYPE_CHECKING:
    from gradus.bench.result import BenchResult


def loader(
    recipe: Annotated[str, typer.Argument(help="A recipe.yaml, whose data is loaded.")],
    workers: Annotated[
        str | None,
        typer.Option("--workers", metavar="0,2,4", help="Numbers to try. Default: 0,2,4,8, as far as more are faster."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="32,64", help="Micro-batches. Default: around the plan's.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="For each measurement.")] = 2.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measure all so often, in turn.")] = 3,
    set_: SetOption = [],  # noqa: B006
    html: HtmlOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
) -> None:
    """Load a recipe's data with several numbers of workers, and in micro-batches of several sizes."""

    def measure() -> BenchResult:
        from gradus.cli.given_work import given_recipe

        counts = numbers_of(workers, "--workers") if workers else None
        sizes = numbers_of(batch, "--batch", least=1) if batch else None
        loaded = given_recipe("bench loader", recipe, set_, None, Path("runs"))
        from gradus.bench.loader import bench_loader

        with contextlib.redirect_stdout(sys.stderr):  # what a user's code prints is no part of our document
            return bench_loader(loaded, counts, sizes, seconds=seconds, rounds=rounds, say=progress)

    run_bench(measure, print_loader, as_json=json, html=html, save=save)


def print_loader(result: BenchResult) -> None:
    print(f"{result.title}: {result.settings['data']}, {result.settings['cores']} cores; measured here")
    print(f"{'micro-batch':>12}{'workers':>9}{'samples/s':>12}{'spread':>9}{'first batch, s':>16}")
    for row in result.rows:
        if row["samples_per_second"] is None:
            print(f"{row['micro_batch']:>12}{row['workers']:>9}{'not tried: more had stopped helping':>37}")
            continue
        spread = "" if row["spread"] is None else f"±{row['spread'] / 2:.0%}"
        print(
            f"{row['micro_batch']:>12}{row['workers']:>9}{row['samples_per_second']:>12,.0f}{spread:>9}"
            f"{row['first_batch_seconds']:>16.2f}"
        )
    found = result.summary
    size, planned = found["micro_batch"], found["plan_micro_batch"]
    which = "as the plan has them" if size == planned else f"which is nearest to the plan's {planned}"
    print(f"best: plan.workers={found['best_workers']} with micro-batches of {size}, {which}")
    print(f"a run would use {found['plan_workers']} ({found['plan_workers_reason']})")
