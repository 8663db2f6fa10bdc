"""`gradus bench knobs`: seven methods, each on and off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gradus.cli.bench_output import HtmlOption, SaveOption, progress, run_bench
from gradus.cli.bench_precision import BatchOption, LimitOption, ModelOption, RecipeArgument
from gradus.cli.bench_table import UNKNOWN, print_table, share, times
from gradus.cli.options import JsonOption, SetOption
from gradus.schema.errors import InputError, unknown_name

if TYPE_CHECKING:
    from gradus.bench.result import BenchResult


def knobs(
    recipe: RecipeArgument = None,
    model: ModelOption = None,
    only: Annotated[str | None, typer.Option("--only", help="Some of the rows, separated by commas.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Trials of each setting, in turns.")] = 3,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Of timed steps in each trial.")] = 3.0,
    batch_size: BatchOption = None,
    limit: LimitOption = 300.0,
    set_: SetOption = [],  # noqa: B006
    html: HtmlOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
) -> None:
    """Measure what seven methods do to speed and memory, beside what is claimed of them (faster/smaller).

    The baseline is one rank, fp32, AdamW, the batch in one piece, data on the device if it fits. Each row changes one
    thing:

    gradient accumulation (N/Y): the batch in 4 micro-batches, one after the other.

    gradient checkpointing (N/Y): plan.recompute full: activations are computed again in backward.

    mixed precision (Y/(N)): plan.precision bf16.

    batch size (Y/Y): twice the batch for speed, half of it for memory.

    optimizer choice (Y/Y): plain SGD in place of AdamW, whose state is twice the parameters.

    DataLoader (Y/N): 4 worker processes in place of none, data not on the device.

    ZeRO (N/Y): 2 ranks that share parameters, gradients and optimizer state (zero 3), in place of 2 replicas; on a
    single GPU or a CPU both ranks are on it.
    """

    def measure() -> BenchResult:
        from gradus.bench.knobs import KNOBS
        from gradus.bench.knobs import knobs as measured
        from gradus.bench.ranks import check_one_process
        from gradus.bench.tried_recipe import given
        from gradus.hardware.cluster import detect_cluster

        check_one_process()
        names = tuple(knob.name for knob in KNOBS)
        chosen = tuple(name.strip() for name in only.split(",")) if only else names
        for name in chosen:
            if name not in names:
                raise unknown_name("row", name, names, field="--only")
        found = given(recipe, model, set_, batch=batch_size)
        if found.batch % 4:
            raise InputError(
                f"batch: found {found.batch}, which cannot be accumulated in 4 parts",
                hint="--batch-size 32",
                field="batch",
                found=found.batch,
                allowed="a multiple of 4",
            )
        return measured(
            found,
            detect_cluster(),
            repeats=repeats,
            seconds=seconds,
            say=progress,
            limit_seconds=limit,
            only=chosen,
        )

    run_bench(measure, _show, as_json=json, html=html, save=save, failed=_nothing_measured)


def _nothing_measured(result: BenchResult) -> bool:
    return all(row["speed_ratio"] is None for row in result.rows)


def _show(result: BenchResult) -> None:
    asked = result.settings
    print(f"{result.title}; batch {asked['batch']}, {asked['repeats']} trials each, in turns; measured here")
    header = ("knob", "speed", "noise", "memory", "faster/smaller", "claimed")
    rows = [
        (
            row["knob"],
            times(row["speed_ratio"]),
            share(row["noise"]),
            times(row["memory_ratio"]),
            UNKNOWN if row["faster"] is None else f"{_word(row['faster'])}/{_word(row['smaller'])}",
            row["claim"],
        )
        for row in result.rows
    ]
    print_table(header, rows)
    for note in result.notes:
        print(note)


def _word(yes: bool) -> str:
    return "Y" if yes else "N"
