"""`gradus bench scaling`: what more ranks bring, measured here or read from logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradus.cli.bench_model import check_precision, model_options
from gradus.cli.bench_output import HtmlOption, SaveOption, numbers_of, progress, run_bench
from gradus.cli.options import JsonOption, SetOption
from gradus.record.format import count_text
from gradus.schema.errors import InputError, unknown_name

if TYPE_CHECKING:
    from gradus.bench.result import BenchResult

_MODES = ("weak", "strong")


def scaling(
    recipe: Annotated[str | None, typer.Argument(help="A recipe.yaml, whose own runs are measured.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Or a model on random data: a name that gradus models lists.")
    ] = None,
    log: Annotated[
        list[str],
        typer.Option("--log", metavar="FILE", help="Or what gradus bench synthetic has printed; one for each number."),
    ] = [],  # noqa: B006
    ranks: Annotated[str | None, typer.Option("--ranks", metavar="1,2,4", help="Default: up to the GPUs.")] = None,
    mode: Annotated[
        str, typer.Option("--mode", help="weak: the same batch for each rank; strong: one batch divided.")
    ] = "weak",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="With --model.")] = 32,
    num_iters: Annotated[int, typer.Option("--num-iters", min=1, help="With --model: timed iterations.")] = 5,
    num_batches_per_iter: Annotated[int, typer.Option("--num-batches-per-iter", min=1, help="Steps in each.")] = 10,
    num_warmup_batches: Annotated[int, typer.Option("--num-warmup-batches", min=0, help="Steps before them.")] = 10,
    steps: Annotated[int, typer.Option("--steps", min=1, help="With a recipe: timed steps of each run.")] = 20,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measure all so often, in turn.")] = 3,
    precision: Annotated[str, typer.Option("--precision", help="With --model: fp32, tf32, bf16, fp16, fp8.")] = "fp32",
    compile_: Annotated[bool, typer.Option("--compile", help="With --model: compile it.")] = False,
    set_: SetOption = [],  # noqa: B006
    html: HtmlOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
) -> None:
    """Run on 1, 2, 4, ... ranks, or read logs: speed-up, efficiency, Amdahl fraction."""

    def measure() -> BenchResult:
        given = [name for name, value in (("RECIPE", recipe), ("--model", model), ("--log", log)) if value]
        if len(given) != 1:
            raise InputError(
                f"RECIPE: found {' and '.join(given) or 'nothing to measure'}, allowed: a recipe, --model or --log",
                hint="gradus bench scaling --model resnet18 --ranks 1,2",
                field="RECIPE",
                found=given or "nothing",
                allowed="one of RECIPE, --model, --log",
            )
        if mode not in _MODES:
            raise unknown_name("mode", mode, _MODES, field="--mode")
        from gradus.bench.scaling import default_counts, scaling_of_logs, scaling_of_model, scaling_of_recipe

        counts = numbers_of(ranks, "--ranks", least=1) if ranks else default_counts()
        if log:
            return scaling_of_logs(log)
        if model is not None:
            from gradus.bench.synthetic import Synthetic

            check_precision(precision)
            times = (num_warmup_batches, num_batches_per_iter, num_iters)
            work = Synthetic(model, model_options(set_), batch_size, *times, precision, compile_)
            return scaling_of_model(work, counts, mode, rounds, progress)  # type: ignore[arg-type]
        from gradus.cli.given_work import given_recipe

        loaded = given_recipe("bench scaling", recipe, set_, None, Path("runs"))
        return scaling_of_recipe(loaded, counts, mode, rounds, steps, progress)  # type: ignore[arg-type]

    run_bench(measure, print_scaling, as_json=json, html=html, save=save)


def print_scaling(result: BenchResult) -> None:
    unit, device = result.settings["unit"], result.settings["device"]
    print(f"{result.title}; {result.provenance}")
    print(f"{device + 's':>6}{unit + '/sec':>14}{'+-':>9}{'speed-up':>11}{'efficiency':>12}{'Amdahl':>9}")
    for row in result.rows:
        fraction = "" if row["amdahl_fraction"] is None else f"{row['amdahl_fraction']:.3f}"
        plus_minus = "" if row["plus_minus"] is None else f"{row['plus_minus']:.1f}"
        how = "" if row["how"] == "processes" else f"  {row['how']}"
        print(
            f"{row['ranks']:>6}{row['samples_per_second']:>14.1f}{plus_minus:>9}{row['speed_up']:>10.2f}×"
            f"{row['efficiency']:>11.1%}{fraction:>10}{how}"
        )
    found = result.summary
    base = found["baseline_ranks"]
    against = f"against {count_text(base, device)}"
    print(f"{found['speed_up']:.2f}× on {found['ranks']} {device}s {against}: efficiency {found['efficiency']:.1%}")
    if found["amdahl_fraction"] is not None:
        limit = f", at most {found['speed_up_limit']:.0f}× on any number" if found["speed_up_limit"] else ""
        print(f"Amdahl fraction {found['amdahl_fraction']:.3f}{limit}")
    for note in result.notes:
        print(note)
