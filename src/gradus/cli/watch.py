"""`gradus watch`: a run as it goes on, until it is over."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gradus.cli.output import print_json
from gradus.cli.watch_display import as_document, as_line, as_renderable, as_text, event_text
from gradus.launcher.watching import View, Watching
from gradus.record.directory import RunDirectory
from gradus.schema.errors import EXIT_FINISHED, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIVE_SECONDS = 2.0
_PLAIN_SECONDS = 10.0
_INTERRUPTED = 130  # as shells have it: the run was left alone, and is not over


def watch_command(run: str, runs: str, *, once: bool = False, every: float | None = None, as_json: bool = False) -> int:
    """Show a run until it is over. Returns its exit code; 0 of one that is not over and was looked at `once`."""
    if every is not None and every <= 0:
        raise InputError(
            f"--every: found {every:g}, allowed: seconds above 0", field="--every", found=every, allowed="above 0"
        )
    watching = Watching(RunDirectory.open(run, Path(runs)))
    if once or as_json:
        return _at_the_end(watching, once, every or _PLAIN_SECONDS, as_json)
    try:
        with _shown() as (show, usual):
            view = _followed(watching, show, every or usual)
    except KeyboardInterrupt:
        print(f"the run goes on without being watched; again: gradus watch {run}", file=sys.stderr)
        return _INTERRUPTED
    return _exit_code(view)


def _at_the_end(watching: Watching, once: bool, every: float, as_json: bool) -> int:
    """One document or text: of now, or of the end."""
    view = watching.look()
    try:
        while not (once or view.over):
            time.sleep(every)
            view = watching.look()
    except KeyboardInterrupt:
        return _INTERRUPTED
    print_json(as_document(view)) if as_json else print(as_text(view))
    return _exit_code(view)


def _followed(watching: Watching, show: Callable[[View], None], every: float) -> View:
    while True:
        view = watching.look()
        show(view)
        if view.over:
            return view
        time.sleep(every)


def _exit_code(view: View) -> int:
    return view.exit_code if view.exit_code is not None else EXIT_FINISHED


@contextmanager
def _shown() -> Iterator[tuple[Callable[[View], None], float]]:
    """How to show a view here, and how often."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or os.environ.get("CI"):
        yield _Lines().show, _PLAIN_SECONDS
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield lambda view: live.update(as_renderable(view, console.height), refresh=True), _LIVE_SECONDS


class _Lines:
    """A line for each look at which something has changed, and one for each event."""

    def __init__(self) -> None:
        self._events: set[str] = set()
        self._line = ""

    def show(self, view: View) -> None:
        for event in view.events:
            text = event_text(event)
            if text not in self._events:
                self._events.add(text)
                print(text, flush=True)
        line = as_line(view)
        if line.partition("  ")[2] != self._line:  # but for the time
            self._line = line.partition("  ")[2]
            print(line, flush=True)
