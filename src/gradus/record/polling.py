"""Polling: something looked after from a thread, where the main one is busy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Polling:
    """Calls a function every so often until it is closed."""

    def __init__(self, poll: Callable[[], None], every_seconds: float) -> None:
        self._poll = poll
        self._every_seconds = every_seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="gradus-polling", daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        while not self._done.wait(self._every_seconds):
            self._poll()

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def __enter__(self) -> Polling:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
