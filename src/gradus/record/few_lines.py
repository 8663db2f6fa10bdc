"""Few lines: the records of a log as it is, if it is short, and of a long one so many that memory stays bounded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gradus.record import strict_json

MOST_LINES = 20_000
_LEAST_LINES = 200  # of a file
# Lines that change what others mean, or that are few and far between.
_ALWAYS = (b'"rolled_back_to"', b'"validation_', b'"epoch"')
_PIECE_BYTES = 1 << 22


def share_of_lines(files: int) -> int:
    """How many of each of so many files: a thousand ranks have one each."""
    return max(_LEAST_LINES, 2 * MOST_LINES // max(1, files))


def few_lines(path: Path, most: int = MOST_LINES) -> list[dict[str, Any]]:
    """All records, or the newest half of `most` and as many of the others, evenly taken. Broken lines are left out."""
    try:
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            count = sum(1 for _ in _lines(file, end))
            newest = count - most // 2 if count > most else 0
            every = max(1, -(-newest // (most // 2)))
            kept = []
            for number, line in enumerate(_lines(file, end)):
                if number >= newest or number % every == 0 or any(word in line for word in _ALWAYS):
                    with contextlib.suppress(ValueError):
                        kept.append(strict_json.decode(line))
            return kept
    except OSError:
        return []


def _lines(file: BinaryIO, end: int) -> Iterator[bytes]:
    """The lines up to a place, an unfinished last one with them: a writer may have died in it."""
    file.seek(0)
    rest = b""
    while file.tell() < end:
        piece = file.read(min(_PIECE_BYTES, end - file.tell()))
        if not piece:  # somebody has cut it off meanwhile
            break
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line for line in whole if line.strip())
    if rest.strip():
        yield rest
