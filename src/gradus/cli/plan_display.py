"""Ranked plans in a terminal: a table, the best plan with its reasons, and bars of its memory and its time.

Where stdout is no terminal, everything but the plan itself is a YAML comment: what `gradus plan R > plan.yaml` writes
is a plan.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.text import Text

from gradus.planner.defaults import Choice
from gradus.planner.shown import (
    COLUMNS,
    Bar,
    Waterfall,
    budget_lines,
    cells,
    gib_text,
    memory_title,
    memory_waterfall,
    refused_lines,
    step_title,
    step_waterfall,
)

PLAIN_WIDTH = 118
NARROWEST_BAR, WIDEST_BAR = 12, 64
NARROWEST_PLAN = 28
EIGHTHS = " ▏▎▍▌▋▊▉█"
VERDICT_STYLES = {"fits": "green", "tight": "yellow", "no": "red"}
BAR_STYLES = ("cyan", "blue", "magenta", "green", "yellow", "bright_cyan", "bright_blue", "bright_magenta", "white")


@dataclass(frozen=True)
class Place:
    """Where it is shown."""

    width: int | None  # None: as wide as it takes
    blocks: bool  # whether parts of a character cell can be drawn


def show_plans(
    choices: Sequence[Choice], refused: Sequence[Mapping[str, object]] = (), stream: TextIO | None = None
) -> None:
    """Print the ranked plans and the best one with all that is known of it."""
    stream = stream or sys.stdout
    best = choices[0]
    plan = best.plan.to_yaml(best.reasons)
    if stream.isatty():
        console = Console(file=stream, highlight=False)
        place = Place(console.width, _can_show_blocks(stream))
        _print(console, _ranked(choices, place))
        console.out(plan, highlight=False)
        _print(console, [*_explained(best, place), *_not_chosen(refused)])
        return
    place = Place(None, _can_show_blocks(stream))
    after = [*_explained(best, place), *_not_chosen(refused)]
    stream.write(_commented(_ranked(choices, place)) + plan + _commented(after))
    stream.flush()


def _ranked(choices: Sequence[Choice], place: Place) -> list[Text]:
    """The plans as a table. Where a terminal is too narrow, the first column is broken, then the last ones go."""
    if choices[0].prediction is None:
        return []
    rows = [{"": str(number), **cells(choice)} for number, choice in enumerate(choices, 1)]
    columns = ["", *(name for name in COLUMNS if any(row[name] for row in rows))]
    left_out: list[str] = []
    sizes = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    if place.width is not None:
        too_wide = sum(sizes[name] + 2 for name in columns) - place.width
        sizes["plan"] = max(min(sizes["plan"], NARROWEST_PLAN), sizes["plan"] - max(0, too_wide))
        while len(columns) > 2 and sum(sizes[name] + 2 for name in columns) > place.width:
            left_out.insert(0, columns.pop())
    lines = [_title("  ".join(name.ljust(sizes[name]) for name in columns).rstrip())]
    for row, choice in zip(rows, choices, strict=True):
        first, *more = textwrap.wrap(row["plan"], sizes["plan"])
        line = Text()
        for name in columns:
            style = VERDICT_STYLES[choice.prediction.verdict] if name == "memory" and choice.prediction else ""
            line.append((first if name == "plan" else row[name]).ljust(sizes[name] + 2), style=style)
        lines += [line, *(Text(" " * (sizes[""] + 2) + rest) for rest in more)]
    for line in lines:
        line.rstrip()
    if left_out:  # not in silence
        said = f"A wider terminal, --html or --json shows more: {', '.join(left_out)}"
        lines += [Text(part) for part in textwrap.wrap(said, place.width or len(said))]
    return [*lines, Text()]


def _explained(best: Choice, place: Place) -> list[Text]:
    """Memory, time and the whole run of the best plan, and what these numbers rest on."""
    found = best.prediction
    if found is None:
        return []
    lines = [Text(), _title(memory_title(found)), *_drawn(memory_waterfall(found), place)]
    if found.host_memory.peak:
        kinds = [f"{name} {gib_text(amount)}" for name, amount in found.host_memory.model_dump().items() if amount]
        lines.append(Text(f"  Host memory of a node: {gib_text(found.host_memory.peak)} ({', '.join(kinds)})"))
    if found.step is not None:
        lines += [Text(), _title(step_title(found)), *_drawn(step_waterfall(found.step), place)]
    else:
        lines += [Text(), Text("No time of a step is predicted, see below for why; --measure measures it.")]
    if found.budget is not None:
        lines += [
            Text(),
            _title("The whole run"),
            *(Text(f"  {line}") for line in budget_lines(found.budget, best.plan)),
        ]
    if found.basis:
        lines += [Text(), _title("What this rests on"), *(Text(f"  {sentence}") for sentence in found.basis)]
    return lines


def _not_chosen(refused: Sequence[Mapping[str, object]]) -> list[Text]:
    if not refused:
        return []
    return [Text(), _title("Not chosen"), *(Text(f"  {line}") for line in refused_lines(refused))]


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _print(console: Console, lines: Sequence[Text]) -> None:
    for line in lines:
        console.print(line)


def _commented(lines: Sequence[Text]) -> str:
    """The lines as comments of YAML, without colours."""
    return "".join(f"# {line.plain}".rstrip() + "\n" for line in lines)


def _drawn(fall: Waterfall, place: Place) -> list[Text]:
    blocks = place.blocks
    bars = [*fall.bars, fall.total, *([fall.hidden] if fall.hidden else [])]
    label = max(len(bar.kind) for bar in bars) + 2
    words = max(len(bar.text) for bar in bars) + 2
    room = max(NARROWEST_BAR, min(WIDEST_BAR, (place.width or PLAIN_WIDTH) - label - words - 4))
    # The mark of the limit is the cell after the last one that is free.
    limit = None if fall.limit is None else min(room, round(fall.limit * room))
    lines = []
    for number, bar in enumerate(bars):
        style = "bold" if bar is fall.total else "dim" if bar is fall.hidden else BAR_STYLES[number % len(BAR_STYLES)]
        drawn = _bar(bar, room, blocks, "░" if bar is fall.hidden else "█")
        line = Text("  ").append(bar.kind.ljust(label), style="bold" if bar is fall.total else "")
        if limit is None:
            line.append(drawn, style=style)
        else:
            line.append(drawn[:limit], style=style).append("│" if blocks else "|", style="red")
            line.append(drawn[limit:], style="red")
        lines.append(line.append("  " + bar.text))
    return lines


def _bar(bar: Bar, room: int, blocks: bool, full: str) -> str:
    """The bar in so many cells, to an eighth of a cell where the terminal can; what is there at all can be seen."""
    start, end = bar.start * room, bar.end * room
    first = min(int(start), room - 1)
    if not blocks:
        return (" " * first + "#" * max(1, round(end) - first)).ljust(room)[:room]
    whole = max(0, int(end) - first)
    rest = round((end - int(end)) * 8) if full == "█" else 0
    text = " " * first + full * whole + (EIGHTHS[rest] if rest else "")
    if not text.strip():
        text = " " * first + EIGHTHS[1]
    return text.ljust(room)[:room]


def _can_show_blocks(stream: TextIO) -> bool:
    try:
        (EIGHTHS + "│░").encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
