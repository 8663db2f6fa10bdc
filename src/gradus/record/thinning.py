"""Thinning: long series as few points as a picture can show, with every extreme kept, in memory that stays bounded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

MOST_POINTS = 1500
Point = tuple[float, float]


class ThinnedSeries:
    """Points as they come, in the order of x. What a picture would show is kept: of each stretch of the axis its first,
    last, lowest and highest point. When there are too many stretches, two become one.
    """

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most = most_points
        self._stretch = 1  # how many points as they came are in one stretch
        self._points: list[Point] = []  # of whole stretches
        # Of the stretch that is being filled: how many, and which of them are kept.
        self._count = 0
        self._first = self._lowest = self._highest = self._last = (0.0, 0.0)
        self.not_finite = 0
        self.first_not_finite: float | None = None

    def __len__(self) -> int:
        return len(self.points)

    def add(self, x: float, y: float) -> None:
        if not math.isfinite(y):
            self.not_finite += 1
            if self.first_not_finite is None:
                self.first_not_finite = x
            return
        point = (x, y)
        if not self._count:
            self._first = self._lowest = self._highest = point
        elif y < self._lowest[1]:
            self._lowest = point
        elif y > self._highest[1]:
            self._highest = point
        self._last = point
        self._count += 1
        if self._count >= self._stretch:
            self._points += self._open
            self._count = 0
            # At twice the limit, so that a shown series always has at least half of what it may have.
            if len(self._points) > 2 * self._most:
                self._stretch *= 2
                self._points = thinned(self._points, self._most)

    def cut(self, x: float) -> None:
        """Forget what is at x or after it: a run went back to before it."""
        self._points = [point for point in self.points if point[0] < x]
        self._count = 0
        if self.first_not_finite is not None and self.first_not_finite >= x:
            self.not_finite, self.first_not_finite = 0, None

    @property
    def _open(self) -> list[Point]:
        if self._count < 2:
            return [self._last] if self._count else []
        return sorted({self._first, self._lowest, self._highest, self._last})

    @property
    def points(self) -> list[Point]:
        return self._points + self._open

    @property
    def last(self) -> Point | None:
        return self._last if self._count else self._points[-1] if self._points else None

    def shown(self, most_points: int | None = None) -> list[Point]:
        return thinned(self.points, most_points or self._most)


def thinned(points: Sequence[Point], most_points: int = MOST_POINTS) -> list[Point]:
    """At most so many of these points, among them the extremes of every part of the axis."""
    if len(points) <= most_points:
        return list(points)
    stretches = max(1, most_points // 4)
    kept: list[Point] = []
    for number in range(stretches):
        first, end = (len(points) * at // stretches for at in (number, number + 1))
        kept += _extremes(points[first:end])
    return kept


def _extremes(points: Sequence[Point]) -> list[Point]:
    """First, lowest, highest and last, in their order, each once."""
    ys = [y for _, y in points]
    chosen = {0, ys.index(min(ys)), ys.index(max(ys)), len(points) - 1}
    return [points[at] for at in sorted(chosen)]


class MeanWindows:
    """Means over windows of an axis of whole numbers. When there are too many windows, they become twice as wide.

    For what is stacked or compared in columns, where a mean is right and an extreme would be wrong.
    """

    def __init__(self, most_windows: int = 120) -> None:
        self._most = most_windows
        self.width = 1
        self._sums: dict[int, dict[str, float]] = {}
        self._weights: dict[int, dict[str, float]] = {}

    def add(self, x: int, values: Mapping[str, float], weight: float = 1.0) -> None:
        """A negative weight takes back what was added before."""
        window = x // self.width
        sums, weights = self._sums.setdefault(window, {}), self._weights.setdefault(window, {})
        for name, value in values.items():
            if math.isfinite(value):
                sums[name] = sums.get(name, 0.0) + value * weight
                weights[name] = weights.get(name, 0.0) + weight
        while len(self._sums) > self._most:
            self._widen()

    def cut(self, x: int) -> None:
        """Forget the windows that begin at x or after it."""
        for window in [window for window in self._sums if window * self.width >= x]:
            del self._sums[window], self._weights[window]

    @property
    def starts(self) -> list[int]:
        return [window * self.width for window in sorted(self._sums)]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for sums in self._sums.values() for name in sums))

    def means(self, name: str) -> list[float | None]:
        """One for each of `starts`."""
        return [
            self._sums[window][name] / self._weights[window][name] if self._weights[window].get(name) else None
            for window in sorted(self._sums)
        ]

    def mean(self, name: str) -> float | None:
        """Over all windows."""
        weight = sum(weights.get(name, 0.0) for weights in self._weights.values())
        return sum(sums.get(name, 0.0) for sums in self._sums.values()) / weight if weight else None

    def _widen(self) -> None:
        self.width *= 2
        for kept in ("_sums", "_weights"):
            old: dict[int, dict[str, float]] = getattr(self, kept)
            new: dict[int, dict[str, float]] = {}
            for window, values in old.items():
                into = new.setdefault(window // 2, {})
                for name, value in values.items():
                    into[name] = into.get(name, 0.0) + value
            setattr(self, kept, new)


def evenly(values: Iterable[float], most: int) -> list[float]:
    """At most so many of these, evenly taken, both ends among them."""
    found = list(values)
    if len(found) <= most:
        return found
    return [found[round(at * (len(found) - 1) / (most - 1))] for at in range(most)]
