"""Charts as HTML: inline SVG that stretches to its place, with text beside it that does not.

A picture is one `<figure>`. Words and numbers are HTML, placed by shares of the axis, so that they can be read at any
width; lines are SVG. The style and the few lines of script that show values under the pointer come with the page
(`page_html`). Without the script, everything is there but that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from gradus.record.chart import Bars, Chart, Heat, Mark, Picture, Series
from gradus.record.chart_bars import bars_html
from gradus.record.chart_frame import COLOURS, HIGH, LONGEST_LEGEND, WIDE, axis, figure, legend, named, tick_labels
from gradus.record.chart_heat import heat_html
from gradus.record.page_html import page
from gradus.record.scale import Scale, roomy, scale_of, tick_text
from gradus.record.thinning import MOST_POINTS, Point, evenly, thinned

__all__ = ["page", "render_chart"]

_MOST_POINTS_OF_A_CHART = 6000
_MOST_MARKS_OF_A_KIND = 150
_FEW_POINTS = 12  # so few are shown as dots, too


def render_chart(picture: Picture) -> str:
    """One `<figure>`; a sentence in place of an empty chart."""
    if not picture.has_data:
        texts = [_not_finite(one, picture.x_label) for one in picture.series] if isinstance(picture, Chart) else []
        note = picture.note or " ".join(filter(None, texts)) or "Nothing was recorded for this chart."
        return f'<p class="missing"><strong>{escape(picture.title)}.</strong> {escape(note)}</p>\n'
    if isinstance(picture, Bars):
        return bars_html(picture)
    return heat_html(picture) if isinstance(picture, Heat) else _lines(picture)


def _lines(chart: Chart) -> str:
    series = _stacked(chart.series) if chart.stacked else [_drawn(one, chart) for one in chart.series]
    series = [one for one in series if one.pieces and one.points]
    marks = _shown_marks(chart)
    base = 2 if chart.x_is_log_2 else 10
    x = scale_of(
        [*(x for one in series for x, _ in one.points), *(mark.x for mark in marks)],
        log=chart.log_x,
        base=base,
    )
    if chart.points:
        x = roomy(x)
    ys = (y for one in series for _, y in [*one.points, *one.floor])
    y = roomy(scale_of(ys, log=chart.log_y, from_zero=chart.from_zero or chart.stacked, base=base))
    ticks_x, ticks_y = x.ticks(6), y.ticks(5)
    drawn = "".join(_path(one, number, x, y, chart) for number, one in enumerate(series))
    # Areas would hide what lies below them.
    below, above = ("", _marks(marks, x)) if chart.stacked else (_marks(marks, x), "")
    notes = [chart.note, *(_not_finite(one, chart.x_label) for one in chart.series)]
    body = f"""<div class="plot">
<div class="y-ticks" aria-hidden="true">{tick_labels(ticks_y, y, "bottom")}</div>
<div class="area">
<svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img" {named(chart.title, _described(chart))}
<path class="grid" d="{"".join(f"M0 {_up(y, tick)}h{WIDE}" for tick in ticks_y)}"/>
{below}{drawn}{above}</svg>
</div>
<div class="x-ticks{" many" if len(ticks_x) > 4 else ""}" aria-hidden="true">{tick_labels(ticks_x, x, "left")}</div>
</div>
<div class="x-label">{escape(chart.x_label)}</div>
"""
    data = (
        f'data-x="{axis(x)}" data-y="{axis(y)}" data-x-label="{escape(chart.x_label)}"'
        f"{' data-whole' if _all_whole(series) else ''}{' data-stacked' if chart.stacked else ''}"
    )
    key = legend([(one.label, f"c{n % COLOURS}", one.dashed) for n, one in enumerate(series)], marks, chart)
    return figure("lines", chart.title, body, key, notes, data, chart.y_label)


@dataclass(frozen=True)
class _Drawn:
    """A series as it is drawn: pieces of thinned points with gaps between them, or a layer on its floor."""

    label: str
    pieces: tuple[tuple[Point, ...], ...]
    dashed: bool = False
    floor: tuple[Point, ...] = ()

    @property
    def points(self) -> list[Point]:
        return [point for piece in self.pieces for point in piece]


def _drawn(series: Series, chart: Chart) -> _Drawn:
    """Pieces between gaps are thinned on their own, so that no line bridges what was not measured."""
    most = max(40, min(MOST_POINTS, _MOST_POINTS_OF_A_CHART // max(1, len(chart.series))))
    pieces: list[list[Point]] = [[]]
    for x, y in zip(series.x, series.y, strict=True):
        if y is not None and math.isfinite(y) and (y > 0 or not chart.log_y) and (x > 0 or not chart.log_x):
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    pieces = [piece for piece in pieces if piece]
    total = sum(len(piece) for piece in pieces)
    if total > most:
        pieces = [thinned(piece, max(4, most * len(piece) // total)) for piece in pieces]
    return _Drawn(series.label, tuple(tuple(piece) for piece in pieces), series.dashed)


def _stacked(series: Sequence[Series]) -> list[_Drawn]:
    """Each on top of those before it."""
    floor = tuple((x, 0.0) for x in series[0].x) if series else ()
    drawn = []
    for one in series:
        top = tuple((x, below + (y or 0.0)) for (x, below), y in zip(floor, one.y, strict=True))
        drawn.append(_Drawn(one.label, (top,), one.dashed, floor))
        floor = top
    return drawn


def _path(one: _Drawn, number: int, x: Scale, y: Scale, chart: Chart) -> str:
    pieces = [[(_across(x, at), _up(y, value)) for at, value in piece] for piece in one.pieces]
    colour = f"c{number % COLOURS}"
    label = escape(one.label)
    if one.floor:
        floor = [(_across(x, at), _up(y, value)) for at, value in reversed(one.floor)]
        return f'<path class="layer {colour}" data-label="{label}" d="{_d([*pieces[0], *floor])}z"/>\n'
    dashes = " dashed" if one.dashed else ""
    path = f'<path class="line {colour}{dashes}" data-label="{label}" d="{"".join(map(_d, pieces))}"/>\n'
    few = not one.dashed if chart.points else sum(map(len, pieces)) <= _FEW_POINTS
    dots = [place for piece in pieces if few or len(piece) == 1 for place in piece]
    if dots:
        # A line of no length with round ends: a dot that keeps its shape however the drawing is stretched.
        path += f'<path class="dots {colour}" d="{"".join(f"M{left} {top}h0" for left, top in dots)}"/>\n'
    return path


def _d(places: Sequence[tuple[int, int]]) -> str:
    """Relative moves: half as long as absolute ones."""
    moves = [f"{right - left} {lower - upper}" for (left, upper), (right, lower) in pairwise(places)]
    return f"M{places[0][0]} {places[0][1]}l{' '.join(moves) or '0 0'}".replace(" -", "-")


def _across(scale: Scale, value: float) -> int:
    return round(scale.share(value) * WIDE)


def _up(scale: Scale, value: float) -> int:
    return round((1 - scale.share(value)) * HIGH)


def _shown_marks(chart: Chart) -> list[Mark]:
    """Not more of a kind than can be told apart."""
    by_kind: dict[str, list[Mark]] = {}
    for mark in chart.marks:
        if mark.x > 0 or not chart.log_x:
            by_kind.setdefault(mark.kind, []).append(mark)
    kept = []
    for marks in by_kind.values():
        places = evenly(range(len(marks)), _MOST_MARKS_OF_A_KIND)
        kept += [marks[int(place)] for place in places]
    return sorted(kept, key=lambda mark: mark.x)


def _marks(marks: Sequence[Mark], x: Scale) -> str:
    return "".join(
        f'<path class="mark {escape(mark.kind)}" data-label="{escape(mark.label)}" d="M{_across(x, mark.x)} 0v{HIGH}">'
        f"<title>{escape(mark.label)}</title></path>\n"
        for mark in marks
    )


def _all_whole(series: Iterable[_Drawn]) -> bool:
    return all(float(x).is_integer() for one in series for x, _ in one.points)


def _not_finite(series: Series, x_label: str) -> str | None:
    found = [x for x, y in zip(series.x, series.y, strict=True) if y is not None and not math.isfinite(y)]
    if not found:
        return None
    what = "value is" if len(found) == 1 else "values are"
    return f"{series.label}: {len(found)} {what} not finite, the first at {x_label} {tick_text(found[0])}; not drawn."


def _described(chart: Chart) -> str:
    """What a reader who cannot see the chart is told of each line."""
    parts = [f"{chart.y_label} over {chart.x_label}."]
    for one in chart.series[:LONGEST_LEGEND]:
        found = [y for y in one.y if y is not None and math.isfinite(y)]
        if found:
            parts.append(
                f"{one.label}: from {tick_text(found[0])} to {tick_text(found[-1])}, "
                f"lowest {tick_text(min(found))}, highest {tick_text(max(found))}."
            )
    return " ".join(parts)
