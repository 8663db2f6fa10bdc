"""Notebook: a live run inside a Jupyter cell, as one output that is replaced in place."""

from __future__ import annotations

import sys
import time
from html import escape
from typing import Any

from gradus.record.format import duration_text
from gradus.record.progress import Progress

_REFRESH_SECONDS = 0.5  # a notebook keeps and sends every update
_SHOWN_MESSAGES = 12


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel. IPython stays optional: without it loaded, this is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class NotebookView:
    """What the run says, then a bar with its progress line."""

    def __init__(self, progress: Progress) -> None:
        from IPython.display import display

        self._progress = progress
        self._started = time.monotonic()
        self._messages: list[str] = []
        self._shown: tuple[str, int, int] | None = None
        self._shown_at = 0.0
        self._closed = False
        self._handle = display(self._bundle("starting"), raw=True, display_id=True)

    def poll(self) -> None:
        self._progress.poll()
        if time.monotonic() - self._shown_at >= _REFRESH_SECONDS:
            self._show()

    def say(self, text: str) -> None:
        self._messages.append(text)
        self._show()

    def close(self) -> None:
        self._progress.poll()
        self._closed = True
        self._show()

    def _show(self) -> None:
        elapsed = duration_text(time.monotonic() - self._started)
        idle = "ended before the first step" if self._closed else "starting"
        line = f"{self._progress.line() if self._progress.step else idle}  elapsed {elapsed}"
        state = (line, self._progress.step, len(self._messages))
        if state != self._shown:
            self._handle.update(self._bundle(line), raw=True)
            self._shown = state
        self._shown_at = time.monotonic()

    def _bundle(self, line: str) -> dict[str, Any]:
        """The same content for notebooks, and for what shows text only."""
        messages = self._messages[-_SHOWN_MESSAGES:]
        total = self._progress.steps_total
        amount = f' value="{self._progress.step}" max="{total}"' if total else ""  # without: a bar that only moves
        spoken = "".join(f"<div>{escape(message)}</div>" for message in messages)
        bar = f"<progress{amount}></progress>" if total or not self._closed else ""
        return {
            "text/plain": "\n".join([*messages, line]),
            "text/html": f"{spoken}<div>{bar} <code>{escape(line)}</code></div>",
        }
