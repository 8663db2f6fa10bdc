"""`gradus bench`: what the machine can do."""

from __future__ import annotations

from typing import Annotated

import typer

from gradus.cli.options import JsonOption
from gradus.cli.output import print_json, run_command
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED, unknown_name

app = typer.Typer(no_args_is_help=True, help="Measure what the machine can do.")

_OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "p2p")
_DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64")


@app.command()
def collectives(
    operations: Annotated[
        list[str] | None, typer.Argument(metavar="[OPERATION]...", help=f"Of {', '.join(_OPERATIONS)}. Default: all.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=2, help="Ranks on each node. Default: the GPUs, else 2.")
    ] = None,
    smallest: Annotated[int, typer.Option("--from", min=8, help="The smallest size in bytes.")] = 1024,
    largest: Annotated[int, typer.Option("--to", min=8, help="The largest size in bytes.")] = 16 << 20,
    dtype: Annotated[str, typer.Option("--dtype", help=f"Of {', '.join(_DTYPES)}.")] = "float32",
    json: JsonOption = False,
) -> None:
    """Time collectives at several sizes, and check every element. In a job: on its nodes."""
    raise typer.Exit(
        run_command(lambda: _collectives(tuple(operations or _OPERATIONS), nproc, smallest, largest, dtype, json), json)
    )


def _collectives(
    operations: tuple[str, ...], nproc: int | None, smallest: int, largest: int, dtype: str, as_json: bool
) -> int:
    from gradus.bench.collectives_start import Asked, collectives, doubling

    for operation in operations:
        if operation not in _OPERATIONS:
            raise unknown_name("operation", operation, _OPERATIONS, field="OPERATION")
    if dtype not in _DTYPES:
        raise unknown_name("type", dtype, _DTYPES, field="--dtype")
    wrong, rows, place = 0, [], {}
    for said in collectives(Asked(operations, doubling(smallest, largest), dtype), nproc):
        if "row" not in said:
            place = said
            continue
        row = said["row"]
        rows.append(row)
        wrong += row["wrong"]
        if not as_json:
            if len(rows) == 1:
                print(f"{row['ranks']} ranks, {place.get('backend')} on {place.get('device')}, {dtype}; measured here")
                print(f"{'operation':<15}{'bytes':>12}{'µs':>12}{'GB/s':>10}{'bus GB/s':>10}{'wrong':>7}")
            print(
                f"{row['operation']:<15}{row['bytes']:>12}{row['seconds'] * 1e6:>12.1f}"
                f"{row['algorithm_gb_per_second']:>10.3f}{row['bus_gb_per_second']:>10.3f}{row['wrong']:>7}",
                flush=True,
            )
    code = EXIT_FAILED if wrong else EXIT_FINISHED
    if as_json:
        print_json({**place, "rows": rows, "wrong": wrong, "provenance": "measured", "exit_code": code})
    return code
