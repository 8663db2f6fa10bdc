"""Shows a live run: a bar on a terminal or in a notebook, one plain line every ten seconds elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from gradus.record.directory import RunDirectory
from gradus.record.format import duration_text
from gradus.record.notebook import NotebookView, in_notebook
from gradus.record.progress import Progress

_PLAIN_EVERY_SECONDS = 10.0
_BAR_WIDTH = 24
_NARROWEST_BAR = 4


class Display:
    """Follows a run's metrics. `poll` is cheap and meant to be called a few times a second.

    A display that can no longer write (the reader of a pipe went away) falls silent; the run goes on.
    """

    def __init__(
        self, run: RunDirectory, steps_total: int | None, stream: TextIO | None = None, plain: bool | None = None
    ) -> None:
        progress = Progress(run, steps_total)
        self._view: _View | None
        if stream is None and plain is None and in_notebook():
            self._view = NotebookView(progress)
            return
        stream = stream or sys.stderr
        if _is_plain(stream) if plain is None else plain:
            self._view = _PlainView(progress, stream)
        else:
            self._view = _BarView(progress, stream)

    def poll(self) -> None:
        self._draw(lambda view: view.poll())

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar."""
        self._draw(lambda view: view.say(text))

    def close(self) -> None:
        """Show the last state and leave the terminal as it was."""
        self._draw(lambda view: view.close())
        self._view = None

    def _draw(self, draw: Callable[[_View], None]) -> None:
        if self._view is None:
            return
        try:
            draw(self._view)
        except OSError:
            self._view = None


class _View(Protocol):
    def poll(self) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class _PlainView:
    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress = progress
        self._stream = stream
        self._shown: str | None = None
        self._shown_at = -_PLAIN_EVERY_SECONDS

    def poll(self) -> None:
        if self._progress.poll() and time.monotonic() - self._shown_at >= _PLAIN_EVERY_SECONDS:
            self._show()

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._progress.poll()
        if self._progress.step and self._progress.line() != self._shown:
            self._show()

    def _show(self) -> None:
        self._shown = self._progress.line()
        self._shown_at = time.monotonic()
        self.say(self._shown)


class _BarView:
    def __init__(self, progress: Progress, stream: TextIO) -> None:
        from rich import progress as bars
        from rich.console import Console
        from rich.table import Column

        self._progress = progress
        self._started = time.monotonic()
        self._column = bars.BarColumn(bar_width=_BAR_WIDTH)
        self._bar = bars.Progress(
            self._column,
            bars.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=Console(file=stream),
            auto_refresh=False,  # the caller polls: no thread that draws while training's own output is printed
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("starting", total=progress.steps_total)
        self._bar.start()

    def poll(self) -> None:
        self._progress.poll()
        elapsed = duration_text(time.monotonic() - self._started)
        text = f"{self._progress.line() if self._progress.step else 'starting'}  elapsed {elapsed}"
        # On a narrow terminal the bar gives way to the numbers.
        self._column.bar_width = max(_NARROWEST_BAR, min(_BAR_WIDTH, self._bar.console.width - len(text) - 1))
        self._bar.update(self._task, total=self._progress.steps_total, completed=self._progress.step, description=text)
        self._bar.refresh()

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.poll()
        self._bar.stop()


def _is_plain(stream: TextIO) -> bool:
    return not stream.isatty() or bool(os.environ.get("CI")) or os.environ.get("TERM") == "dumb"
