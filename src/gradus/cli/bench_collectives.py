"""`gradus bench collectives`: a table as the OSU micro-benchmarks and nccl-tests print them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gradus.cli.bench_output import HtmlOption, SaveOption, check_html, finish
from gradus.cli.options import JsonOption
from gradus.cli.output import run_command
from gradus.record.format import count_text
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED, unknown_name

_OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "p2p")
_DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64")
_BACKENDS = ("gloo", "nccl", "mpi")


def collectives(
    operations: Annotated[
        list[str] | None, typer.Argument(metavar="[OPERATION]...", help=f"Of {', '.join(_OPERATIONS)}. Default: all.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="gloo, nccl or mpi (under mpirun). Default: nccl on GPUs, else gloo."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=2, help="Ranks on each node. Default: the GPUs, else 2.")
    ] = None,
    smallest: Annotated[int, typer.Option("--from", min=8, help="The smallest size in bytes.")] = 1024,
    largest: Annotated[int, typer.Option("--to", min=8, help="The largest size in bytes.")] = 16 << 20,
    dtype: Annotated[str, typer.Option("--dtype", help=f"Of {', '.join(_DTYPES)}.")] = "float32",
    html: HtmlOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
) -> None:
    """Time collectives at several sizes, and check every element. In a job: on its nodes."""

    def measure() -> int:
        from gradus.bench.collectives_start import Asked, collectives, doubling, result_of

        check_html(html)
        wanted = tuple(operations or _OPERATIONS)
        for operation in wanted:
            if operation not in _OPERATIONS:
                raise unknown_name("operation", operation, _OPERATIONS, field="OPERATION")
        if dtype not in _DTYPES:
            raise unknown_name("type", dtype, _DTYPES, field="--dtype")
        if backend is not None and backend not in _BACKENDS:
            raise unknown_name("backend", backend, _BACKENDS, field="--backend")
        asked = Asked(wanted, doubling(smallest, largest), dtype, backend)
        place: dict[str, Any] = {}
        rows: list[dict[str, Any]] = []
        for said in collectives(asked, nproc):
            if "row" not in said:
                place = said
                continue
            rows.append(said["row"])
            if not json:
                _print_row(rows, place)
        if not rows:
            return EXIT_FINISHED  # of several processes, the first has them
        wrong = sum(row["wrong"] for row in rows)
        code = EXIT_FAILED if wrong else EXIT_FINISHED
        return finish(result_of(asked, place, rows), json, html, save, exit_code=code, **place, wrong=wrong)

    raise typer.Exit(run_command(measure, json))


def _print_row(rows: list[dict[str, Any]], place: dict[str, Any]) -> None:
    row = rows[-1]
    if len(rows) == 1:
        ranks = count_text(row["ranks"], "rank")
        print(f"{ranks}, {place['backend']} on {place['device']}, {row['dtype']}; measured here")
    if len(rows) == 1 or rows[-2]["operation"] != row["operation"]:
        print(f"# {row['operation']}")
        print(f"{'# size (bytes)':<15}{'latency (µs)':>14}{'algorithm (GB/s)':>18}{'bus (GB/s)':>12}{'errors':>8}")
    print(
        f"{row['bytes']:<15}{row['seconds'] * 1e6:>14.2f}{row['algorithm_gb_per_second']:>18.3f}"
        f"{row['bus_gb_per_second']:>12.3f}{row['wrong']:>8}",
        flush=True,
    )
