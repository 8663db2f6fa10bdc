"""Changing: a page in sections, of which only those are sent again that are not what the reader has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import Any

from gradus.record.page_html import Head, Section, head_html, page

# As often as a page asks; and drawing takes at most a tenth of the time.
_LEAST_SECONDS = 2.0
_PATIENCE = 10.0


@dataclass
class Changing:
    """Drawn when somebody asks, if something was written since, and not too often."""

    draw: Callable[[], tuple[Head, list[Section]]]
    fingerprint: Callable[[], object]
    """Other than before if there may be something to draw."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _drawn: tuple[Head, list[Section]] | None = None
    _sections: dict[str, str] = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)
    _version: int = 0
    _drawn_of: object = None
    _next_at: float = 0.0

    def whole(self, script: Callable[[int], str]) -> str:
        """The page as it is now, with the script that asks for what is new to its version."""
        with self._lock:
            self._refresh()
            drawn, version = self._drawn, self._version
        assert drawn is not None
        # What may run is said by the server, which knows the scripts.
        return page(*drawn, script=script(version), policy=None)

    def since(self, version: int) -> dict[str, Any]:
        """What is new to a reader who has this version; all of it to one who has a version that never was."""
        with self._lock:
            self._refresh()
            known = version if 0 <= version <= self._version else 0
            news = {name: html for name, html in self._sections.items() if self._versions[name] > known}
            return {"version": self._version, "order": list(self._sections), "sections": news}

    def _refresh(self) -> None:
        now = time.monotonic()
        if now < self._next_at:
            return
        files = self.fingerprint()
        if self._drawn is not None and files == self._drawn_of:
            return
        self._drawn = self.draw()
        drawn = _by_id(*self._drawn)
        spent = time.monotonic() - now
        self._next_at = now + spent + max(_LEAST_SECONDS, _PATIENCE * spent)
        self._drawn_of = files
        changed = [name for name, html in drawn.items() if html != self._sections.get(name)]
        if changed or list(drawn) != list(self._sections):
            self._version += 1
            self._versions = {name: self._versions.get(name, 0) for name in drawn}
            self._versions |= dict.fromkeys(changed, self._version)
            self._sections = drawn


def _by_id(head: Head, sections: list[Section]) -> dict[str, str]:
    """Each as it stands in the page, so that it can be put in the place of its older self."""
    drawn = {"head": f'<header id="head">{head_html(head)}</header>'}
    for one in sections:
        title = f"<h2>{escape(one.heading)}</h2>"
        drawn[one.id] = f'<section id="{escape(one.id)}">{title}\n<div class="body">\n{one.html}</div></section>'
    return drawn
