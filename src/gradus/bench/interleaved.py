"""Interleaved: variants measured in turn, several times over, so that what else the machine does meets all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Name = TypeVar("Name")


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing. The median is what counts; how far apart they lie says how much it does."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def lowest(self) -> float:
        return min(self.values)

    @property
    def highest(self) -> float:
        return max(self.values)

    @property
    def relative(self) -> float | None:
        """From the lowest to the highest, as a part of the median; None of a single one, which says nothing of it."""
        if len(self.values) < 2 or self.median == 0:
            return None
        return (self.highest - self.lowest) / abs(self.median)

    def document(self) -> dict[str, Any]:
        return {
            "median": self.median,
            "lowest": self.lowest,
            "highest": self.highest,
            "spread": self.relative,
            "repeats": len(self.values),
        }

    @property
    def text(self) -> str:
        """How far apart, for people."""
        return "one measurement" if self.relative is None else f"±{self.relative / 2:.1%}"


def interleaved(variants: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, Spread]:
    """Measure each variant once a round; every second round goes backwards, so that nobody is always the first."""
    found: dict[Name, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        order = list(variants) if number % 2 == 0 else list(variants)[::-1]
        for name in order:
            found[name].append(variants[name]())
    return {name: Spread(tuple(values)) for name, values in found.items()}
