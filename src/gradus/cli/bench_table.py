"""Tables of benchmarks for people: the first column to the left, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.record.format import bytes_text, rate_text

UNKNOWN = "–"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    sizes = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for first, *rest in (header, *rows):
        texts = [text.rjust(size) for text, size in zip(rest, sizes[1:], strict=True)]
        print("  ".join([first.ljust(sizes[0]), *texts]).rstrip(), flush=True)


def times(ratio: float | None) -> str:
    """`1.24×`."""
    return UNKNOWN if ratio is None else f"{ratio:.2f}×"


def share(part: float | None, digits: int = 1) -> str:
    return UNKNOWN if part is None else f"{part:.{digits}%}"


def rate(per_second: float | None) -> str:
    return UNKNOWN if per_second is None else rate_text(per_second, "samples")


def size(count: int | None) -> str:
    return UNKNOWN if count is None else bytes_text(count)


def decimal(value: float | None, digits: int = 4) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}g}"
