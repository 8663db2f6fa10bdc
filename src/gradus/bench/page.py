"""A benchmark's result as one page that opens offline: what came out, pictures, all rows, settings."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from gradus.bench.result import BenchResult
from gradus.record.chart_html import render_chart
from gradus.record.format import bytes_text, number_text
from gradus.record.page_html import Head, Section, page, paragraph, table_html


def bench_page(result: BenchResult) -> str:
    when = datetime.fromtimestamp(result.time).strftime("%Y-%m-%d %H:%M")
    head = Head(result.title, f"gradus bench {result.kind}, {result.provenance}, {when}")
    pictures = "".join(render_chart(picture) for picture in result.charts)
    sections = [
        Section("result", "Result", _pairs(result.summary) + "".join(map(paragraph, result.notes))),
        Section("pictures", "Pictures", f'<div class="charts">{pictures}</div>' if pictures else ""),
        Section("rows", "All rows", _rows(result)),
        Section("settings", "Settings", _pairs(result.settings)),
        Section("environment", "Environment", _pairs(_plain(result.environment))),
    ]
    return page(head, [section for section in sections if section.html])


def _pairs(values: Mapping[str, Any]) -> str:
    rows = [(_words(key), _text(key, value)) for key, value in values.items()]
    return table_html(("what", "value"), rows, text_columns=2) if rows else ""


def _rows(result: BenchResult) -> str:
    columns = list(dict.fromkeys(key for row in result.rows for key in row))
    if not columns:
        return ""
    # Words first: a column of numbers is set apart from those.
    words = [key for key in columns if any(isinstance(row.get(key), str) for row in result.rows)]
    ordered = [*words, *(key for key in columns if key not in words)]
    rows = [[None if row.get(key) is None else _text(key, row[key]) for key in ordered] for row in result.rows]
    return table_html([_words(key) for key in ordered], rows, text_columns=len(words))


def _plain(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What fits into a line; packages one by one."""
    plain = {key: value for key, value in environment.items() if isinstance(value, (str, int, float))}
    gpus = [str(gpu.get("name")) for gpu in environment.get("gpus", ())]
    return {**plain, "gpus": ", ".join(gpus) or "none", **environment.get("packages", {})}


def _words(key: str) -> str:
    return key.replace("_", " ").removesuffix(" bytes")


def _text(key: str, value: Any) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return "; ".join(_text(key, item) for item in value) or "none"
    if isinstance(value, Mapping):
        return "; ".join(f"{_words(str(name))} {_text(str(name), item)}" for name, item in value.items()) or "none"
    if isinstance(value, (int, float)) and key.endswith("_bytes"):
        return bytes_text(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 10_000 <= abs(value) < 1e15 else number_text(value)
    return str(value)
