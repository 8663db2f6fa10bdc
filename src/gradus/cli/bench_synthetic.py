"""`gradus bench synthetic`: the lines of the OSU lab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gradus.cli.bench_model import check_precision, model_options
from gradus.cli.bench_output import HtmlOption, SaveOption, progress, run_bench
from gradus.cli.options import JsonOption, SetOption

if TYPE_CHECKING:
    from gradus.bench.result import BenchResult


def synthetic(
    model: Annotated[str, typer.Option("--model", help="A name that gradus models lists.")] = "resnet50",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Samples of each rank in a step.")] = 32,
    num_iters: Annotated[int, typer.Option("--num-iters", min=1, help="Timed iterations.")] = 10,
    num_batches_per_iter: Annotated[int, typer.Option("--num-batches-per-iter", min=1, help="Steps in each.")] = 10,
    num_warmup_batches: Annotated[int, typer.Option("--num-warmup-batches", min=0, help="Steps before them.")] = 10,
    precision: Annotated[str, typer.Option("--precision", help="fp32, tf32, bf16, fp16, fp8 or fp64.")] = "fp32",
    compile_: Annotated[bool, typer.Option("--compile", help="Compile the model.")] = False,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Images with channels innermost.")] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Ranks on each node. Default: the GPUs, else 1.")
    ] = None,
    set_: SetOption = [],  # noqa: B006
    html: HtmlOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
) -> None:
    """Train a model on random data, and say how many samples a second that makes. Under srun or mpirun: all ranks."""

    def measure() -> BenchResult | None:
        from gradus.bench.synthetic import Synthetic
        from gradus.bench.synthetic import synthetic as measured

        check_precision(precision)
        work = Synthetic(
            model,
            model_options(set_),
            batch_size,
            num_warmup_batches,
            num_batches_per_iter,
            num_iters,
            precision,
            compile_,
            channels_last,
            nproc,
        )
        return measured(work, progress if json else lambda line: print(line, flush=True))

    run_bench(measure, lambda result: None, as_json=json, html=html, save=save)  # its lines are printed as they come
