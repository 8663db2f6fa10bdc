"""`gradus bench batch-size`: accuracy against batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gradus.cli.bench_output import HtmlOption, SaveOption, numbers_of, progress, run_bench
from gradus.cli.bench_precision import LimitOption, ModelOption, RecipeArgument
from gradus.cli.bench_table import UNKNOWN, decimal, print_table
from gradus.cli.options import JsonOption, SetOption
from gradus.record.format import metric_text

if TYPE_CHECKING:
    from gradus.bench.result import BenchResult


def batch_size(
    recipe: RecipeArgument = None,
    model: ModelOption = None,
    batches: Annotated[str, typer.Option("--batch", help="Which, separated by commas.")] = "32,128,512",
    samples: Annotated[int, typer.Option("--samples", min=4, help="That each run trains on.")] = 12_000,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each, with seeds of their own.")] = 1,
    warm_up: Annotated[
        float, typer.Option("--warm-up", min=0.001, max=1.0, help="The part of the steps in which the rate rises.")
    ] = 0.2,
    limit: LimitOption = 600.0,
    set_: SetOption = [],  # noqa: B006
    html: HtmlOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
) -> None:
    """Train on the same number of samples with larger and larger batches, with and without a warm-up.

    The learning rate grows in proportion to the batch. Without a recipe: 1,797 handwritten digits and a small network.
    """

    def measure() -> BenchResult:
        from gradus.bench.batch_size import batch_size as measured
        from gradus.bench.batch_size import digits
        from gradus.bench.tried_recipe import given, plan_here
        from gradus.planner.resolve import resolved
        from gradus.schema.recipe import Recipe

        sizes = numbers_of(batches, "--batch", least=1)
        if recipe is None and model is None:
            found = resolved(Recipe.from_document(digits(), "digits", set_))
        else:
            found = given(recipe, model, set_)
        plan = plan_here(found, 1)[0].plan
        return measured(
            found, plan, sizes, samples, seeds=seeds, say=progress, warm_up_share=warm_up, limit_seconds=limit
        )

    run_bench(measure, _show, as_json=json, html=html, save=save, failed=_nothing_measured)


def _nothing_measured(result: BenchResult) -> bool:
    return all(row["why"] for row in result.rows)


def _show(result: BenchResult) -> None:
    name = result.summary["metric"]
    samples = f"{result.settings['samples']:,}"
    print(f"{result.title}; {samples} samples each, learning rate in proportion to the batch; measured here")
    rows = [
        (
            str(row["batch"]),
            "yes" if row["warmup"] else "no",
            str(row["steps"]),
            decimal(row["lr"]),
            "diverged" if row["diverged"] else UNKNOWN if row[name] is None else metric_text(name, row[name]),
            decimal(row["training_loss"]),
        )
        for row in result.rows
    ]
    print_table(("batch", "warm-up", "steps", "lr", name.replace("_", " "), "training loss"), rows)
    for row in result.rows:
        if row["why"]:
            print(f"batch {row['batch']}: {row['why']}")
