"""Plot: metrics of one or more runs against their steps, as a matplotlib figure."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from gradus.record.metrics import VALIDATION
from gradus.record.table import Table
from gradus.schema.errors import InputError, unknown_name

DEFAULT = ("loss", "validation_loss")
_PANEL_INCHES = (6.4, 3.6)


def plot_metrics(tables: Mapping[str, Table], names: Sequence[str] = (), *, log: bool = False) -> Any:
    """A figure with a line for each run and metric; a metric and its validation counterpart share a panel.

    Without names: the loss, and the validation loss where there is one.
    """
    chosen = _checked(tables, names)
    figure = _new_figure()
    panels = _panels(chosen)
    width, height = _PANEL_INCHES
    figure.set_size_inches(width * len(panels), height)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, table in tables.items():
            color = None  # each run has one colour in a panel; a validation metric is the dashed line
            for name in panel:
                steps, values = _points(table, name)
                if not steps:
                    continue
                text = " · ".join(([label] if len(tables) > 1 else []) + ([_words(name)] if len(panel) > 1 else []))
                style = {"linestyle": "--", "marker": "o", "markersize": 3} if name.startswith(VALIDATION) else {}
                (line,) = axes.plot(steps, values, color=color, label=text or None, **style)
                color = line.get_color() if len(tables) > 1 else None
        axes.set_xlabel("step")
        axes.set_ylabel(_words(panel[0]))
        if log:
            axes.set_yscale("log")
        if len(tables) > 1 or len(panel) > 1:
            axes.legend()
        axes.grid(alpha=0.3)
    figure.set_layout_engine("tight")
    return figure


def _checked(tables: Mapping[str, Table], names: Sequence[str]) -> list[str]:
    known = list(dict.fromkeys(name for table in tables.values() for name in table.columns if _is_number(table, name)))
    if not known:
        raise InputError("plot: the run has logged no step yet", hint="plot again when it has, or see result.log()")
    # Metrics of the recipe are measured in evaluations alone: `accuracy` can only mean `validation_accuracy`.
    names = [VALIDATION + name if name not in known and VALIDATION + name in known else name for name in names]
    for name in names:
        if name not in known:
            raise unknown_name("metric", name, known, field="plot")
    return list(dict.fromkeys(names)) or [name for name in DEFAULT if name in known] or known[-1:]


def _is_number(table: Table, name: str) -> bool:
    return any(isinstance(value, (int, float)) for value in table[name])


def _panels(names: Sequence[str]) -> list[list[str]]:
    panels: dict[str, list[str]] = {}
    for name in names:
        panels.setdefault(name.removeprefix(VALIDATION), []).append(name)
    return list(panels.values())


def _points(table: Table, name: str) -> tuple[list[int], list[float]]:
    """The steps that have this metric. A run that is compared may lack it altogether."""
    if name not in table.columns:
        return [], []
    found = [(step, value) for step, value in zip(table["step"], table[name], strict=True) if value is not None]
    return [step for step, _ in found], [value for _, value in found]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _new_figure() -> Any:
    """A figure of its own: pyplot would keep every figure alive, and a notebook would show each one twice."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "plot: matplotlib is not installed here",
            hint='pip install "gradus[notebook]"; result.metrics has the numbers',
        ) from None

    class Picture(Figure):
        """Shows itself as the last value of a notebook cell, whether or not pyplot was set up for that."""

        def _repr_png_(self) -> bytes:
            content = io.BytesIO()
            self.savefig(content, format="png")
            return content.getvalue()

    return Picture()
