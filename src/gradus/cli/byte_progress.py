"""Progress of what reads or writes many bytes: a bar for each file on a terminal, a line in ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PLAIN_EVERY_SECONDS = 10.0

Report = Callable[[int, int | None], None]  # bytes so far, and in all if that is known


@contextmanager
def byte_progress() -> Iterator[Callable[[str], Report]]:
    """What gives a report for the file of a name. All on stderr."""
    if not sys.stderr.isatty():
        yield _plain_report
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def bar(name: str) -> Report:
            task = bars.add_task(name, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield bar


def _plain_report(name: str) -> Report:
    last = time.monotonic()

    def report(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= _PLAIN_EVERY_SECONDS:
            last = time.monotonic()
            print(f"{name}: {done:,}{f' of {total:,}' if total else ''} bytes", file=sys.stderr, flush=True)

    return report
