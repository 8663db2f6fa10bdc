"""Durations and intervals as people write them: `90s`, `12m`, `1h30m`, or a number of steps."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"^(\d+(?:\.\d+)?[smhd])+$")


def seconds_of(duration: str) -> float:
    """Seconds in a duration such as `1h30m`."""
    if not _DURATION.match(duration):
        raise ValueError("a duration such as 90s, 12m or 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)([smhd])", duration))


def _checked(value: object) -> object:
    steps = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    duration = isinstance(value, str) and bool(_DURATION.match(value)) and seconds_of(value) > 0
    if not (steps or duration or value == "auto"):
        raise ValueError("a number of steps (at least 1), a time such as 90s, 12m or 1h30m, or auto")
    return value


Interval = Annotated[int | str, BeforeValidator(_checked)]


def _duration(value: object) -> object:
    if not (isinstance(value, str) and _DURATION.match(value) and seconds_of(value) > 0):
        raise ValueError("a time such as 90s, 12m or 1h30m")
    return value


Duration = Annotated[str, BeforeValidator(_duration)]
