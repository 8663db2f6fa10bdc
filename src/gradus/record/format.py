"""Numbers as people read them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """`23.4 GiB`: always GiB, so that two numbers can be compared at a glance, but for what is tiny."""
    gib = count / 2**30
    if abs(gib) < 0.01 and count:
        for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
            if abs(count) >= size:
                return f"{count / size:.3g} {unit}"
        return f"{count:.0f} B"
    return f"{gib:,.0f} GiB" if gib >= 1000 else f"{gib:.3g} GiB"


def count_text(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def first_line(text: object) -> str:
    """Of an error's text, or any other, without the white space around it; empty where there is nothing."""
    return str(text).strip().partition("\n")[0].rstrip()


def error_text(error: BaseException) -> str:
    """`ValueError: too long`, in one line; an assertion often says nothing but what it is."""
    said = first_line(error)
    return f"{type(error).__name__}{f': {said}' if said else ''}"


def rate_text(per_second: float, unit: str) -> str:
    """`41.2 k tok/s`."""
    for prefix in ("", "k ", "M "):
        if per_second < 999.5:
            return f"{per_second:.3g} {prefix}{unit}/s"
        per_second /= 1000
    return f"{per_second:,.3g} G {unit}/s"


def duration_text(seconds: float) -> str:
    """`0:23`, `1:02:03`, `2 d 03:04:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def number_text(value: float) -> str:
    """A loss or an accuracy: four significant digits."""
    return f"{value:.4g}"


def metric_text(name: str, value: float) -> str:
    """A metric by its name: a part of one as a percentage, anything else as a number."""
    return f"{value:.1%}" if name.removeprefix("ema_") == "accuracy" else number_text(value)
