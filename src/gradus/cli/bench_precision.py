"""`gradus bench precision`: the same training in each number format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from gradus.cli.bench_output import HtmlOption, SaveOption, progress, run_bench
from gradus.cli.bench_table import decimal, print_table, rate, share, size, times
from gradus.cli.options import JsonOption, SetOption
from gradus.record.format import count_text
from gradus.schema.errors import unknown_name

RecipeArgument = Annotated[str | None, typer.Argument(help="A recipe.yaml; or give --model.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="A name that gradus models lists, on made-up data.")]
BatchOption = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Samples in a step. Default: the recipe's.")
]
NprocOption = Annotated[int | None, typer.Option("--nproc", min=1, help="Ranks here. Default: the GPUs, else 1.")]
LimitOption = Annotated[float, typer.Option("--trial-seconds", min=1, help="A trial that takes longer is ended.")]

if TYPE_CHECKING:
    from gradus.bench.result import BenchResult


def precision(
    recipe: RecipeArgument = None,
    model: ModelOption = None,
    precisions: Annotated[
        str, typer.Option("--precision", help="Which, separated by commas.")
    ] = "fp32,tf32,fp16,bf16,fp8",
    steps: Annotated[int, typer.Option("--steps", min=4, help="Timed steps of each trial.")] = 30,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Trials of each precision, in turns.")] = 3,
    batch_size: BatchOption = None,
    nproc: NprocOption = None,
    limit: LimitOption = 300.0,
    set_: SetOption = [],  # noqa: B006
    html: HtmlOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
) -> None:
    """Compare fp32, tf32, fp16, bf16 and fp8: speed, memory, and the loss with the same seed and samples."""

    def measure() -> BenchResult:
        from gradus.bench.precision import PRECISIONS
        from gradus.bench.precision import precision as measured
        from gradus.bench.tried_recipe import given, plan_here
        from gradus.schema.plan import Precision

        names = [name.strip() for name in precisions.split(",")]
        for name in names:
            if name not in PRECISIONS:
                raise unknown_name("precision", name, PRECISIONS, field="--precision")
        found = given(recipe, model, set_, batch=batch_size)
        choice, cluster = plan_here(found, nproc)
        wanted = cast("list[Precision]", names)
        return measured(
            found, choice.plan, cluster, wanted, steps=steps, repeats=repeats, say=progress, limit_seconds=limit
        )

    run_bench(measure, _show, as_json=json, html=html, save=save, failed=_nothing_measured)


def _nothing_measured(result: BenchResult) -> bool:
    return all(row["state"] != "measured" for row in result.rows)


def _show(result: BenchResult) -> None:
    asked = result.settings
    trials = f"{count_text(asked['repeats'], 'trial')} of {count_text(asked['steps'], 'step')}"
    print(f"{result.title}; batch {asked['batch']}, {trials}, in turns; measured here")
    header = ("precision", "speed", "±", "over first", "memory", "over first", "loss", "gap")
    rows = [
        (
            row["precision"],
            rate(row["samples_per_second"]),
            share(row["spread"]),
            times(row["speed_up"]),
            size(row["memory_bytes"]),
            times(row["memory_ratio"]),
            decimal(row["loss"]),
            share(row["loss_gap"], 2),
        )
        for row in result.rows
    ]
    print_table(header, rows)
    for note in result.notes:
        print(note)
