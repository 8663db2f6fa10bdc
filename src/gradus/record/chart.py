"""Chart: what a picture shows, as data. How it is drawn is another file's business (`chart_html`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """One line of a chart. A `None` in `y` is a gap: nothing was measured there. A series of one point is a dot."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    dashed: bool = False

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y), (self.label, len(self.x), len(self.y))


@dataclass(frozen=True)
class Mark:
    """A moment on the x axis: a restart, a checkpoint, a fault."""

    x: float
    label: str
    kind: str = "event"  # event, checkpoint, restart, fault, stop: marks of a kind look alike


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis. Labels carry their units: "step time, s"."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    marks: tuple[Mark, ...] = ()
    note: str | None = None
    stacked: bool = False  # areas on top of each other; all series then have the same x, and no gaps
    from_zero: bool = False  # the y axis begins at 0, for amounts whose size is compared
    points: bool = False  # dots, also where lines join them: measurements at a few settings
    x_is_log_2: bool = False  # with log_x: ticks at powers of two, for numbers of GPUs; those of log_y, too

    @property
    def has_data(self) -> bool:
        return any(value is not None and math.isfinite(value) for series in self.series for value in series.y)


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, each of one part or of several on end: label -> parts (kind, value)."""

    title: str
    unit: str
    rows: tuple[tuple[str, tuple[tuple[str, float], ...]], ...]
    note: str | None = None

    @property
    def has_data(self) -> bool:
        return any(parts for _, parts in self.rows)


@dataclass(frozen=True)
class Heat:
    """A strip of cells for each row over a common axis: who was slow, and when. Darker is more."""

    title: str
    x_label: str
    unit: str
    x: Sequence[float]  # where each column begins
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    note: str | None = None

    @property
    def has_data(self) -> bool:
        return any(value is not None and math.isfinite(value) for _, values in self.rows for value in values)


Picture = Chart | Bars | Heat
