"""`gradus bench replicas`: several processes on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradus.cli.bench_model import check_precision, model_options
from gradus.cli.bench_output import HtmlOption, SaveOption, numbers_of, progress, run_bench
from gradus.cli.options import JsonOption, SetOption
from gradus.record.format import bytes_text
from gradus.schema.errors import InputError

if TYPE_CHECKING:
    from gradus.bench.result import BenchResult


def replicas(
    recipe: Annotated[str | None, typer.Argument(help="A recipe.yaml, whose own steps are measured.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Or a model on random data: a name that gradus models lists.")
    ] = None,
    counts: Annotated[str, typer.Option("--replicas", metavar="1,2,4", help="Numbers of processes.")] = "1,2,4",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="With --model: of each process.")] = 32,
    num_iters: Annotated[int, typer.Option("--num-iters", min=1, help="Timed iterations.")] = 5,
    num_batches_per_iter: Annotated[int, typer.Option("--num-batches-per-iter", min=1, help="Steps in each.")] = 10,
    num_warmup_batches: Annotated[int, typer.Option("--num-warmup-batches", min=0, help="Steps before them.")] = 10,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measure all so often, in turn.")] = 3,
    precision: Annotated[str, typer.Option("--precision", help="With --model: fp32, tf32, bf16, fp16, fp8.")] = "fp32",
    averaged: Annotated[
        bool, typer.Option("--averaged", help="With --model: they train one model together, as AccDP's do.")
    ] = False,
    mps: Annotated[bool, typer.Option("--mps/--no-mps", help="Also with NVIDIA's MPS, where it is there.")] = True,
    set_: SetOption = [],  # noqa: B006
    html: HtmlOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
) -> None:
    """Run several processes on one GPU, or on the CPU, against one."""

    def measure() -> BenchResult:
        check_precision(precision)
        wanted = numbers_of(counts, "--replicas", least=1)
        if 1 not in wanted:
            wanted = (1, *wanted)  # what all others are compared with
        if (recipe is None) == (model is None):
            found = "both" if recipe is not None else "neither a recipe nor --model"
            raise InputError(
                f"RECIPE: found {found}, allowed: a recipe or --model",
                hint="gradus bench replicas --model simple-cnn",
                field="RECIPE",
                found=found,
                allowed="one of RECIPE, --model",
            )
        if averaged and recipe is not None:
            raise InputError(
                "--averaged: found it with a recipe, whose replicas each train their own model here",
                hint="train the recipe with --set plan.ranks_per_gpu=2, or use --model",
                field="--averaged",
                found="a recipe",
                allowed="--model",
            )
        from gradus.bench.replicas import RecipeSteps, bench_replicas
        from gradus.bench.synthetic import Synthetic

        times = (num_warmup_batches, num_batches_per_iter, num_iters)
        work: Synthetic | RecipeSteps
        if model is not None:
            work = Synthetic(model, model_options(set_), batch_size, *times, precision)
        else:
            from gradus.cli.given_work import given_recipe

            work = RecipeSteps(given_recipe("bench replicas", recipe, set_, None, Path("runs")), *times)
        return bench_replicas(work, wanted, rounds, averaged=averaged, use_mps=mps, say=progress)

    run_bench(measure, print_replicas, as_json=json, html=html, save=save)


def print_replicas(result: BenchResult) -> None:
    unit = result.settings["unit"]
    print(f"{result.title}; measured here")
    print(f"{'processes':>10}  {'':<15}{unit + '/sec':>12}{'spread':>9}{'against one':>13}{'memory each':>13}")
    for row in result.rows:
        spread = "" if row["spread"] is None else f"±{row['spread'] / 2:.1%}"
        memory = row["memory_peak_bytes_each"]
        print(
            f"{row['replicas']:>10}  {row['how']:<15}{row['samples_per_second']:>12,.1f}{spread:>9}"
            f"{row['against_one']:>12.2f}×{'' if memory is None else bytes_text(memory):>13}"
        )
    for note in result.notes:
        print(note)
