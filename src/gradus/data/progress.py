"""Progress of long work on data: one line on stderr every ten seconds, so that nobody thinks that it hangs."""

from __future__ import annotations

import sys
import time

EVERY_SECONDS = 10.0


class Progress:
    """`tokenising: 34 % of 1,200,000 documents, 812,345,678 tokens`."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        """Show how far it is, unless something was shown a moment ago."""
        if time.monotonic() - self._last >= EVERY_SECONDS:
            self._last = time.monotonic()
            print(f"{self._doing}: {text}", file=sys.stderr, flush=True)
