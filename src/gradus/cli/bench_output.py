"""How benchmarks end: as one document, as a page, as a file to keep; and what they share of their options."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from gradus.cli.output import print_json, run_command, shown
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED, InputError

if TYPE_CHECKING:
    from gradus.bench.result import BenchResult

HtmlOption = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Also write a page with the picture.")]
SaveOption = Annotated[bool, typer.Option("--save", help="Keep the result in runs/bench; gradus report shows it.")]

SAVED = Path("runs") / "bench"


def progress(text: str) -> None:
    """What is being done now: to people who wait, never into the document."""
    print(text, file=sys.stderr, flush=True)


def run_bench(
    measure: Callable[[], BenchResult | None],
    show: Callable[[BenchResult], None],
    *,
    as_json: bool,
    html: str | None,
    save: bool,
    failed: Callable[[BenchResult], bool] = lambda result: False,
) -> NoReturn:
    """A whole command: measure, show it to people, keep what was asked for. Of several processes one has a result."""

    def command() -> int:
        check_html(html)
        result = measure()
        if result is None:
            return EXIT_FINISHED
        if not as_json:
            show(result)
        return finish(result, as_json, html, save, exit_code=EXIT_FAILED if failed(result) else EXIT_FINISHED)

    raise typer.Exit(run_command(command, as_json))


def finish(
    result: BenchResult,
    as_json: bool,
    html: str | None,
    save: bool,
    *,
    exit_code: int = EXIT_FINISHED,
    **further: Any,
) -> int:
    """Write what was asked for. The text for people is printed by then; a document is printed here, and alone."""
    if html is not None:
        from gradus.bench.page import bench_page

        file = Path(html)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(bench_page(result), encoding="utf-8")
        progress(f"written to {shown(file)}")
    if save:
        name = f"{result.kind}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(result.time))}.json"
        file = result.save(SAVED / name)
        progress(f"written to {shown(file)}; gradus report {shown(file)} shows it")
    if as_json:
        print_json({**result.document(), **further, "exit_code": exit_code})
    return exit_code


def check_html(html: str | None) -> None:
    """Before anything is measured: a page that cannot be written would be noticed at the very end."""
    if html is not None and Path(html).is_dir():
        raise InputError(
            f"--html: found {html}, which is a folder", field="--html", found=html, allowed="the name of a file"
        )


def numbers_of(text: str, field: str, *, least: int = 0) -> tuple[int, ...]:
    """`1,2,4` as numbers, each once, in the order given."""
    numbers = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < least:
            raise InputError(
                f"{field}: found {text!r}, allowed: whole numbers of at least {least}, such as 1,2,4",
                field=field,
                found=text,
                allowed=f"whole numbers of at least {least}",
            )
        numbers.append(int(part))
    return tuple(dict.fromkeys(numbers))
