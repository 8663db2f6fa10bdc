"""Trace file: the events of a Chrome trace, plain or gzip'ed, one after another, with bounded memory.

A trace of a few steps can have a gigabyte, so it is never in memory as a whole: the text comes in pieces, and json's
own scanner, which is in C, takes event after event from them. A file that ends early is read as far as it goes.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from json.scanner import make_scanner
from pathlib import Path
from typing import Any, cast

from gradus.schema.errors import InputError

_PIECE = 4 << 20
_LARGEST = 64 << 20  # characters of anything but the list of events: no trace has so much
_SUSPECT = 1 << 20  # an event that cannot be read although so much follows it is broken, and not incomplete
_BETWEEN = re.compile(r"[\s,]*")
_NEXT_EVENT = re.compile(r"\{\s*\"(?:ph|name|cat|args|ts|pid)\"")
_EVENTS = "traceEvents"
_GZIP = b"\x1f\x8b"


class TraceFile:
    """Iterate for its events. `about` has what else the file says, `truncated` whether it ended early; both are
    complete once the events are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.truncated = False
        self.broken = 0  # events that were skipped, because they could not be read
        self._scan = make_scanner(cast(Any, json.JSONDecoder(strict=False)))
        self._text, self._at = "", 0
        self._pieces: Iterator[str] = iter(())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                self._pieces = _text(file)
                yield from self._document()
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}", file=str(self.path)) from None
        except zlib.error as error:
            raise self._no_trace(f"its compressed data is damaged ({error})") from None

    def _document(self) -> Iterator[dict[str, Any]]:
        first = self._next_character()
        if first is None:
            raise InputError(f"{self.path}: the file is empty", file=str(self.path), found="empty")
        if first == "[":  # Chrome's other form: the list of events alone
            self._at += 1
            yield from self._list()
            return
        if first != "{":
            raise self._no_trace(f"it begins with {self._text[self._at : self._at + 20]!r}")
        self._at += 1
        found = False
        while (character := self._next_character()) is not None and character != "}":
            key = self._value()
            colon = self._next_character() if key is not _CUT else None
            if colon is None:
                break
            if not isinstance(key, str) or colon != ":":
                raise self._no_trace("it is no JSON")
            self._at += 1
            begins = self._next_character()
            if key == _EVENTS and begins == "[":
                found = True
                self._at += 1
                yield from self._list()
            else:
                value = self._value()
                if value is _CUT:
                    break
                self.about[key] = value
        if not found:
            raise self._no_trace(f"it has no {_EVENTS}")
        if self._next_character() != "}":
            self.truncated = True

    def _list(self) -> Iterator[dict[str, Any]]:
        scan, between = self._scan, _BETWEEN.match
        while True:
            try:
                while True:
                    text, at = self._text, self._at
                    at = between(text, at).end()  # type: ignore[union-attr]
                    if text[at : at + 1] == "]":
                        self._at = at + 1
                        return
                    event, self._at = scan(text, at)
                    if isinstance(event, dict):
                        yield event
            except (StopIteration, json.JSONDecodeError):
                self._at = at
            if len(self._text) - self._at > _SUSPECT and (after := _NEXT_EVENT.search(self._text, self._at + 1)):
                self._at = after.start()
                self.broken += 1
            elif not self._more():
                self.truncated = True
                return

    def _value(self) -> Any:
        """The next value; `_CUT` where the file ends within it."""
        while True:
            try:
                value, end = self._scan(self._text, self._at)
                if end < len(self._text):  # else it may go on
                    self._at = end
                    return value
            except (StopIteration, json.JSONDecodeError):
                if len(self._text) - self._at > _LARGEST:
                    raise self._no_trace("it is no JSON") from None
            if not self._more():
                return _CUT

    def _next_character(self) -> str | None:
        while True:
            found = _BETWEEN.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return None

    def _more(self) -> bool:
        piece = next(self._pieces, None)
        if piece is None:
            return False
        self._text, self._at = self._text[self._at :] + piece, 0
        return True

    def _no_trace(self, why: str) -> InputError:
        return InputError(
            f"{self.path}: this is no trace: {why}",
            hint="traces are what gradus train --profile writes into the run's traces/, or torch.profiler's "
            "export_chrome_trace",
            file=str(self.path),
            allowed="a Chrome trace in JSON, plain or gzip'ed",
        )


_CUT = object()


def _text(file: Any) -> Iterator[str]:
    """The text of a file in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for piece in _bytes(file):
        yield decoder.decode(piece)


def _bytes(file: Any) -> Iterator[bytes]:
    piece = file.read(_PIECE)
    if not piece.startswith(_GZIP):
        while piece:
            yield piece
            piece = file.read(_PIECE)
        return
    # Not by the gzip module: of a file that ends early, it gives away what it has.
    unpacker, given = zlib.decompressobj(wbits=31), False
    while piece:
        try:
            yield unpacker.decompress(piece, _PIECE)
        except zlib.error:
            if given:
                return  # damaged from here on, which is as good as cut
            raise
        given = True
        piece = unpacker.unconsumed_tail
        if unpacker.eof:
            piece = unpacker.unused_data or file.read(_PIECE)
            unpacker = zlib.decompressobj(wbits=31)
        elif not piece:
            piece = file.read(_PIECE)
    yield unpacker.flush()
