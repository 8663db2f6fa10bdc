"""Page: ranked plans as one HTML file that opens anywhere, without a network, scripts of others or a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, StrictUndefined

from gradus.planner.defaults import Choice
from gradus.planner.shown import (
    COLUMNS,
    Waterfall,
    budget_lines,
    cells,
    memory_title,
    memory_waterfall,
    numbers,
    step_title,
    step_waterfall,
)

TEMPLATE = "page.html.j2"


@dataclass(frozen=True)
class Chart:
    """A waterfall with its heading."""

    title: str
    fall: Waterfall
    name: str  # memory or step


def plan_page(
    title: str, subtitle: str, choices: Sequence[Choice], refused: Sequence[Mapping[str, object]] = ()
) -> str:
    """The page, with the same numbers as `--json`: a table to sort, and for each plan memory, time and reasons."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files("gradus.planner").joinpath(TEMPLATE).read_text("utf-8"))
    rows = [cells(choice) for choice in choices]
    columns = [name for name in COLUMNS if any(row[name] for row in rows)]
    plans = [
        {
            "cells": [(row[name], numbers(choice)[name]) for name in columns],
            "verdict": choice.prediction.verdict if choice.prediction else "",
            "charts": _charts(choice),
            "budget": _budget(choice),
            "basis": choice.prediction.basis if choice.prediction else [],
            "settings": [
                (line.partition(":")[0], line.partition(": ")[2], choice.reasons.get(line.partition(":")[0], ""))
                for line in choice.plan.to_yaml().splitlines()
            ],
        }
        for choice, row in zip(choices, rows, strict=True)
    ]
    return template.render(title=title, subtitle=subtitle, columns=columns, plans=plans, refused=list(refused))


def _charts(choice: Choice) -> list[Chart]:
    found = choice.prediction
    if found is None:
        return []
    charts = [Chart(memory_title(found), memory_waterfall(found), "memory")]
    if found.step is not None:
        charts.append(Chart(step_title(found), step_waterfall(found.step), "step"))
    return charts


def _budget(choice: Choice) -> list[str]:
    found = choice.prediction
    return budget_lines(found.budget, choice.plan) if found is not None and found.budget is not None else []
