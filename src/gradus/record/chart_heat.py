"""Heat strips as HTML: a row of cells for each of many, darker where the value is larger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby

from gradus.record.chart import Heat
from gradus.record.chart_frame import WIDE, axis, figure, named, percent, tick_labels, value_text
from gradus.record.scale import Scale

HEAT_LEVELS = 9  # classes h0 to h8 of the page's style


_ROW = 20  # the height of a row in the drawing's own units


def heat_html(heat: Heat) -> str:
    values = [value for _, row in heat.rows for value in row if value is not None and math.isfinite(value)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    # One slow step, as the first, must not make all others look alike.
    dark = sorted(values)[round(0.98 * (len(values) - 1))]
    shares = [
        [None if value is None or not math.isfinite(value) else (value - low) / span for value in row]
        for _, row in heat.rows
    ]
    lowest, highest = value_text(low, heat.unit), value_text(high, heat.unit)
    said = f"{heat.title} over {heat.x_label}: lowest {lowest}, highest {highest}."
    names = [label for label, _ in heat.rows]
    every = math.ceil(len(names) / 16)
    labels = "".join(
        f'<span style="top:{percent((number + 0.5) / len(names))}">{escape(name)}</span>'
        for number, name in enumerate(names)
        if number % every == 0
    )
    x = Scale(float(heat.x[0]), float(heat.x[-1]) if len(heat.x) > 1 else float(heat.x[0]) + 1)
    size = f"0 0 {WIDE} {len(names) * _ROW}"
    cells = _cells(shares, (dark - low) / span or 1.0)
    body = f"""<div class="plot rows" style="--rows:{len(names)}">
<div class="y-ticks" aria-hidden="true">{labels}</div>
<div class="area">
<svg viewBox="{size}" preserveAspectRatio="none" role="img" {named(heat.title, said)}{cells}</svg>
</div>
<div class="x-ticks many" aria-hidden="true">{tick_labels(x.ticks(6), x, "left")}</div>
</div>
<div class="x-label">{escape(heat.x_label)}</div>
"""
    levels = "".join(f'<i class="h{level}"></i>' for level in range(HEAT_LEVELS))
    darkest = value_text(dark, heat.unit) + (" or more" if dark < high else "")
    key = f'<p class="legend heat-key">{escape(lowest)} {levels} {escape(darkest)}</p>\n'
    texts = (" ".join("-" if share is None else f"{share * 999:.0f}" for share in row) for row in shares)
    data = (
        f'data-x="{axis(x)}" data-y="{low!r} {high!r}" data-x-label="{escape(heat.x_label)}" '
        f'data-rows="{escape("|".join(names))}" data-cells="{"|".join(texts)}" data-whole'
    )
    return figure("heat", heat.title, body, key, [heat.note], data)


def _cells(shares: Sequence[Sequence[float | None]], darkest: float) -> str:
    """One path for each level of darkness, in which neighbours that are alike are one piece."""
    paths: dict[int, list[str]] = {}
    for number, row in enumerate(shares):
        levels = [None if share is None else min(HEAT_LEVELS - 1, int(share / darkest * HEAT_LEVELS)) for share in row]
        begin = 0
        for level, alike in groupby(levels):
            end = begin + len(list(alike))
            if level is not None:
                left, right = round(begin / len(row) * WIDE), round(end / len(row) * WIDE)
                piece = f"M{left} {number * _ROW}h{right - left}v{_ROW - 1}h{left - right}z"
                paths.setdefault(level, []).append(piece)
            begin = end
    return "".join(f'<path class="h{level}" d="{"".join(pieces)}"/>' for level, pieces in sorted(paths.items()))
