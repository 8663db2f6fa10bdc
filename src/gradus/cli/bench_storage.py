"""`gradus bench storage`: how fast a folder can be read, in one go and in small pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gradus.cli.bench_output import HtmlOption, SaveOption, progress, run_bench
from gradus.cli.options import JsonOption
from gradus.schema.errors import InputError

if TYPE_CHECKING:
    from gradus.bench.result import BenchResult


def storage(
    path: Annotated[
        str, typer.Argument(metavar="FOLDER", help="On the file system in question; test files are gone afterwards.")
    ],
    against: Annotated[
        str | None, typer.Option("--against", metavar="FOLDER", help="Another one, such as the node's own disk.")
    ] = None,
    file_mib: Annotated[int, typer.Option("--file-mib", min=1, help="Size of the large file.")] = 256,
    sample_kib: Annotated[int, typer.Option("--sample-kib", min=1, help="Size of a sample.")] = 100,
    files: Annotated[int, typer.Option("--files", min=2, help="How many small files.")] = 512,
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="At most, for each row of small reads.")] = 5.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measure all so often, in turn.")] = 3,
    html: HtmlOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
) -> None:
    """Read a large file, random pieces of it, and many small files, with the page cache dropped."""

    def measure() -> BenchResult:
        from gradus.bench.storage import Asked, bench_storage

        if sample_kib > file_mib * 1024:
            raise InputError(
                f"--sample-kib: found {sample_kib}, which is more than the large file of {file_mib} MiB",
                field="--sample-kib",
                found=sample_kib,
                allowed=f"at most {file_mib * 1024}",
            )
        return bench_storage(path, Asked(file_mib, sample_kib, files, seconds, rounds), against, progress)

    run_bench(measure, print_storage, as_json=json, html=html, save=save)


def print_storage(result: BenchResult) -> None:
    print(f"{result.title} ({result.summary['file_system']}); measured here")
    print(f"{'':<20}{'MB/s':>10}{'spread':>9}{'samples/s':>12}{'of sequential':>15}")
    before = result.rows[0]["path"]
    for row in result.rows:
        if row["path"] != before:
            before = row["path"]
            print(before)
        spread = "" if row["spread"] is None else f"±{row['spread'] / 2:.0%}"
        samples = "" if row["samples_per_second"] is None else f"{row['samples_per_second']:,.0f}"
        share = "" if row["against_sequential"] is None else f"{row['against_sequential']:.0%}"
        print(f"{row['what']:<20}{row['megabytes_per_second']:>10,.0f}{spread:>9}{samples:>12}{share:>15}")
    for line in (*result.notes, *(f"advice: {text}" for text in result.summary["advice"])):
        print(line)
