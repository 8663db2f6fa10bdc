"""The frame of a chart: its caption, legend, ticks and description, and the drawing's own units."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from gradus.record.chart import Chart, Mark
from gradus.record.scale import Scale, tick_text

COLOURS = 10  # classes c0 to c9 of the page's style
# The drawing's own units: whole numbers are short, and fine enough to read values back from.
WIDE, HIGH = 4000, 10000
LONGEST_LEGEND = 24


def figure(
    kind: str, title: str, body: str, legend_html: str, notes: Iterable[str | None], data: str = "", unit: str = ""
) -> str:
    texts = "".join(f'<p class="note">{escape(text)}</p>\n' for text in notes if text)
    unit_text = f' <span class="unit">{escape(unit)}</span>' if unit and unit != title else ""
    return (
        f'<figure class="chart {kind}" {data}>\n<figcaption>{escape(title)}{unit_text}</figcaption>\n'
        f"{legend_html}{body}{texts}</figure>\n"
    )


def legend(entries: Sequence[tuple[str, str, bool]], marks: Sequence[Mark], chart: Chart | None) -> str:
    said = {chart.title.lower(), chart.y_label.lower()} if chart is not None else set()
    # One line that the title names already needs no legend.
    shown = entries if len(entries) != 1 or entries[0][0].lower() not in said else []
    items = [
        f'<li><i class="{colour}{" dashed" if dashed else ""}"></i>{escape(label)}</li>'
        for label, colour, dashed in shown[:LONGEST_LEGEND]
    ]
    if len(shown) > LONGEST_LEGEND:
        items.append(f"<li>and {len(shown) - LONGEST_LEGEND} more</li>")
    items += [f'<li><i class="mark {escape(kind)}"></i>{escape(kind)}</li>' for kind in _kinds(marks)]
    return f'<ul class="legend">{"".join(items)}</ul>\n' if items else ""


def _kinds(marks: Sequence[Mark]) -> list[str]:
    return list(dict.fromkeys(mark.kind for mark in marks))


def named(title: str, description: str) -> str:
    """The attributes and elements by which a drawing says what it is."""
    # From what is drawn: the same page twice is the same file.
    mark = hashlib.sha256(f"{title}\n{description}".encode()).hexdigest()[:10]
    return (
        f'aria-labelledby="t{mark} d{mark}"><title id="t{mark}">{escape(title)}</title>'
        f'<desc id="d{mark}">{escape(description)}</desc>'
    )


def tick_labels(ticks: Sequence[float], scale: Scale, side: str) -> str:
    step = None if scale.log else min((after - before for before, after in pairwise(ticks)), default=None)
    return "".join(
        # A number at the very end of the axis would stick out of the card.
        f"<span{' class=end' if side == 'left' and scale.share(tick) > 0.96 else ''} "
        f'style="{side}:{percent(scale.share(tick))}">{tick_text(tick, step)}</span>'
        for tick in ticks
    )


def percent(share: float) -> str:
    return f"{share * 100:.2f}".rstrip("0").rstrip(".") + "%"


def axis(scale: Scale) -> str:
    return f"{scale.low!r} {scale.high!r}{' log' if scale.log else ''}"


def value_text(value: float, unit: str) -> str:
    if unit in ("s", "seconds"):
        for limit, factor, name in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs")):
            if value >= limit:
                return f"{value * factor:.3g} {name}"
    if unit == "%":
        return f"{value:.1f} %"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".strip()
