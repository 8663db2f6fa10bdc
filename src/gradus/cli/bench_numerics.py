"""`gradus bench numerics`: what number formats do to a model's own numbers."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gradus.cli.bench_output import HtmlOption, SaveOption, progress, run_bench
from gradus.cli.bench_precision import BatchOption, ModelOption, RecipeArgument
from gradus.cli.bench_table import decimal, print_table, share
from gradus.cli.options import JsonOption, SetOption
from gradus.schema.errors import unknown_name

if TYPE_CHECKING:
    from gradus.bench.result import BenchResult


def numerics(
    recipe: RecipeArgument = None,
    model: ModelOption = None,
    formats: Annotated[
        str,
        typer.Option("--formats", help="Of tf32, bf16, fp16, e4m3, e5m2, e3m2, e2m3, e2m1, separated by commas."),
    ] = "tf32,bf16,fp16,e4m3,e5m2",
    steps: Annotated[int, typer.Option("--steps", min=1, help="The step that is looked at; those before train.")] = 3,
    batch_size: BatchOption = None,
    set_: SetOption = [],  # noqa: B006
    html: HtmlOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
) -> None:
    """Show the error and range of number formats on a model's own weights, activations and gradients; on a CPU too.

    A scale may be shared by a tensor, a row, or a block of 128 numbers; `loss` is fp16 with a loss scale of 65,536.
    """

    def measure() -> BenchResult:
        from gradus.bench.number_formats import FORMATS
        from gradus.bench.numerics import numerics as measured
        from gradus.bench.tried_recipe import given, plan_here

        names = tuple(name.strip() for name in formats.split(","))
        for name in names:
            if name not in FORMATS:
                raise unknown_name("format", name, FORMATS, field="--formats")
        found = given(recipe, model, set_, batch=batch_size)
        plan = plan_here(found, 1)[0].plan
        with contextlib.redirect_stdout(sys.stderr):  # what a user's code prints is no part of our document
            return measured(found, plan, steps=steps, formats=names, say=progress)

    run_bench(measure, _show, as_json=json, html=html, save=save)


def _show(result: BenchResult) -> None:
    print(f"{result.title}: {result.summary['layers']} layers, step {result.settings['steps']}; measured here")
    for kind, found_range in result.summary["ranges"].items():
        low, high = found_range["lowest_power_of_two"], found_range["highest_power_of_two"]
        print(f"  {kind}s lie between 2^{low:.0f} and 2^{high:.0f}, {found_range['zeros']:.0%} of them are 0")
    header = (
        "what",
        "format",
        "scale",
        "SNR dB",
        "rel. error",
        "to zero",
        "too large",
        "worst dB",
        "worst layer",
    )
    rows = [
        (
            row["kind"],
            row["format"],
            row["scale"],
            decimal(row["snr_db"], 3),
            decimal(row["relative_error"], 2),
            share(row["underflow"], 2),
            share(row["overflow"], 2),
            decimal(row["worst_snr_db"], 3),
            row["worst_layer"],
        )
        for row in sorted(result.rows, key=lambda row: row["kind"])
    ]
    print_table(header, rows)
    for note in result.notes:
        print(note)
