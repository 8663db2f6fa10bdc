"""Bars as HTML: a table with a drawing in each row."""

from __future__ import annotations

from html import escape

from gradus.record.chart import Bars
from gradus.record.chart_frame import COLOURS, WIDE, figure, legend, named, value_text


def bars_html(bars: Bars) -> str:
    kinds = list(dict.fromkeys(kind for _, parts in bars.rows for kind, _ in parts))
    # Bars that are called as what they show need no colour to tell them apart.
    plain = all(len(parts) == 1 and parts[0][0] == label for label, parts in bars.rows)
    colours = {kind: f"c{0 if plain else number % COLOURS}" for number, kind in enumerate(kinds)}
    longest = max((sum(value for _, value in parts) for _, parts in bars.rows), default=0.0) or 1.0
    rows = []
    for label, parts in bars.rows:
        total = sum(value for _, value in parts)
        left = 0.0
        pieces = []
        for kind, value in parts:
            wide = value / longest * WIDE
            text = f"{kind}: {value_text(value, bars.unit)}" + (
                f" ({value / total:.1%})" if len(parts) > 1 and total else ""
            )
            pieces.append(
                f'<rect class="{colours[kind]}" x="{left:.0f}" width="{max(wide, 0):.0f}" height="20">'
                f"<title>{escape(text)}</title></rect>"
            )
            left += wide
        said = "; ".join(f"{kind} {value_text(value, bars.unit)}" for kind, value in parts)
        rows.append(
            f'<tr><th scope="row">{escape(label)}</th><td class="track">'
            f'<svg viewBox="0 0 {WIDE} 20" preserveAspectRatio="none" role="img" '
            f"{named(f'{bars.title}: {label}', said)}{''.join(pieces)}</svg></td>"
            f"<td>{escape(value_text(total, bars.unit))}</td></tr>"
        )
    body = f'<table class="bars">{"".join(rows)}</table>\n'
    key = "" if plain or len(kinds) == 1 else legend([(kind, colours[kind], False) for kind in kinds], (), None)
    return figure("stack", bars.title, body, key, [bars.note])
