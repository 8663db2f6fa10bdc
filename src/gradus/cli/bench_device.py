"""`gradus bench device`: what a GPU, or this CPU, really does, beside what is quoted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gradus.cli.bench_output import HtmlOption, SaveOption, progress, run_bench
from gradus.cli.options import JsonOption
from gradus.schema.errors import InputError

if TYPE_CHECKING:
    from gradus.bench.result import BenchResult


def device(
    gpu: Annotated[int | None, typer.Option("--gpu", min=0, help="Which one. Default: the first.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="The CPU, though there is a GPU.")] = False,
    size: Annotated[
        int | None, typer.Option("--size", min=32, help="Side of the matrices. Default: 8192, on a CPU 1024.")
    ] = None,
    memory_mib: Annotated[
        int | None, typer.Option("--memory", min=1, metavar="MIB", help="Of the arrays. Default: 1024, on a CPU 128.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.001, help="For each measurement.")] = 0.5,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measure all so often, in turn.")] = 3,
    html: HtmlOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
) -> None:
    """Matrix products by type, memory and copies, beside the catalogue's numbers."""

    def measure() -> BenchResult:
        if size is not None and size % 16:
            raise InputError(
                f"--size: found {size}, allowed: a multiple of 16, or tensor cores are left out",
                field="--size",
                found=size,
                allowed="a multiple of 16",
            )
        if cpu and gpu is not None:
            raise InputError("--cpu: found it together with --gpu", field="--cpu", found="both", allowed="one of them")
        import torch

        from gradus.bench.device import bench_device
        from gradus.hardware.detect import detect_machine
        from gradus.training.device import rank_device

        count = len(detect_machine().gpus)
        if gpu is not None and gpu >= count:
            raise InputError(
                f"--gpu: found {gpu}, but there {'is 1 GPU' if count == 1 else f'are {count} GPUs'} here",
                field="--gpu",
                found=gpu,
                allowed=f"less than {count}" if count else "none",
            )
        chosen = torch.device("cpu") if cpu else rank_device(gpu or 0)
        return bench_device(chosen, size=size, memory_mib=memory_mib, seconds=seconds, rounds=rounds, say=progress)

    run_bench(measure, print_device, as_json=json, html=html, save=save)


def print_device(result: BenchResult) -> None:
    print(f"{result.title}; measured here")
    print(f"{'':<9}{'':<36}{'measured':>12} {'':<8}{'spread':>8}{'quoted':>10}{'reached':>9}")
    for row in result.rows:
        if row["value"] is None:
            continue
        quoted = "" if row["quoted"] is None else f"{row['quoted']:,.4g}"
        share = "" if row["share"] is None else f"{row['share']:.0%}"
        spread = "" if row["spread"] is None else f"±{row['spread'] / 2:.1%}"
        value = f"{row['value']:,.4g}"
        print(f"{row['group']:<9}{row['name']:<36}{value:>12} {row['unit']:<8}{spread:>8}{quoted:>10}{share:>9}")
    for note in result.notes:
        print(note)
