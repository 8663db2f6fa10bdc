"""Loss curve: the losses of a run as they come, few enough to keep, and as a line of blocks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

_BLOCKS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"
_MOST_POINTS = 4096  # a terminal is a few hundred columns wide


class LossCurve:
    """The losses that the run kept: an attempt that goes on from a checkpoint takes back those after it."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []

    @property
    def last(self) -> float | None:
        return self.losses[-1] if self.losses else None

    def add(self, record: Mapping[str, Any]) -> None:
        step, loss = record.get("step"), record.get("loss")
        back = record.get("rolled_back_to")
        if isinstance(back, int):
            self._cut(back + 1)
        if not isinstance(step, int) or not isinstance(loss, (int, float)):
            return
        self._cut(step)
        self.steps.append(step)
        self.losses.append(float(loss))
        if len(self.steps) > _MOST_POINTS:
            del self.steps[:-1:2], self.losses[:-1:2]

    def _cut(self, step: int) -> None:
        at = bisect_left(self.steps, step)
        del self.steps[at:], self.losses[at:]


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` blocks; each is the mean of its share of the values, higher for a larger one.

    >>> sparkline([4.0, 3.0, 2.0, 1.0], 4)
    '█▆▃▁'
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    cuts = [round(number * len(values) / count) for number in range(count + 1)]
    means = [_mean(values[cuts[number] : cuts[number + 1]]) for number in range(count)]
    finite = [mean for mean in means if math.isfinite(mean)]
    lowest, highest = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(mean, lowest, highest) for mean in means)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _block(value: float, lowest: float, highest: float) -> str:
    if not math.isfinite(value):
        return _NOT_FINITE
    share = (value - lowest) / (highest - lowest) if highest > lowest else 0.0
    return _BLOCKS[min(len(_BLOCKS) - 1, math.floor(share * (len(_BLOCKS) - 1) + 0.5))]
