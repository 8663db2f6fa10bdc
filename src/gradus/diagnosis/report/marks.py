"""Marks: what happened to a run, as moments on the axes of its charts, and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from gradus.record.chart import Mark
from gradus.record.history import History
from gradus.record.page_html import missing, paragraph, table_html

# What an event is to a reader, and so how it looks in a chart. Others are in the table only.
_KINDS = {
    "checkpoint": "checkpoint",
    "restart": "restart",
    "resume": "restart",
    "rollback": "restart",
    "fault": "fault",
    "stop-request": "stop",
}
# Of each step or save; everything else that happens is worth a line.
_DULL = frozenset({"checkpoint-waits", "checkpoint-note"})
_SHOWN_EVENTS = 80
_LONGEST_TEXT = 240


def moment(event: Mapping[str, Any]) -> float | None:
    """Unix time of an event."""
    try:
        return datetime.fromisoformat(str(event.get("time"))).timestamp()
    except ValueError:
        return None


def text_of(event: Mapping[str, Any]) -> str:
    """What an event says, on one line."""
    said = event.get("message") or event.get("reason") or event.get("path") or ""
    if event.get("event") in ("start", "launch") and event.get("ranks"):
        said = f"{event['ranks']} ranks"
    text = " ".join(str(said).split())
    kind = f"{event['kind']}: " if event.get("event") == "fault" and event.get("kind") else ""
    return kind + (text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…")


def step_marks(history: History) -> tuple[Mark, ...]:
    """On an axis of steps. An event that names no step is where the run was at that time, if that is known."""
    marks = []
    for event in _marked(history.events):
        step = event.get("step")
        when = moment(event)
        at = float(step) if isinstance(step, int) else history.step_at(when) if when is not None else None
        if at is not None:
            marks.append(_mark(at, event))
    return tuple(marks)


def time_marks(history: History, unit_seconds: float) -> tuple[Mark, ...]:
    """On an axis of time since the first sample of a device."""
    if history.begun is None:
        return ()
    found = [(moment(event), event) for event in _marked(history.events)]
    return tuple(
        _mark((when - history.begun) / unit_seconds, event)
        for when, event in found
        if when is not None and when >= history.begun
    )


def _marked(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those with a place in charts. Of a new attempt that goes on from a checkpoint once, by its `resume`."""
    resumed = {event.get("attempt") for event in events if event.get("event") == "resume"}
    return [
        event
        for event in events
        if event.get("event") in _KINDS
        and not (event.get("event") == "restart" and _next(event) in resumed)
        and not (event.get("event") == "resume" and "step" not in event)
    ]


def _next(event: Mapping[str, Any]) -> int | None:
    attempt = event.get("attempt")
    return attempt + 1 if isinstance(attempt, int) else None


def _mark(at: float, event: Mapping[str, Any]) -> Mark:
    name, text = str(event["event"]), text_of(event)
    where = f" at step {event['step']}" if "step" in event else ""
    attempt = f" (attempt {event['attempt']})" if name in ("resume", "restart") and "attempt" in event else ""
    said = f": {text}" if text and name != "checkpoint" else ""
    return Mark(at, f"{name}{where}{attempt}{said}", _KINDS[name])


def events_html(history: History) -> str:
    """The table: all but the dullest, and of many the first few and the last."""
    events = [event for event in history.events if event.get("event") and event.get("event") not in _DULL]
    if not events:
        return missing("No events: the run wrote none, or it has not begun.")
    shown, left_out = events, 0
    if len(events) > _SHOWN_EVENTS:
        few = _SHOWN_EVENTS // 4
        left_out = len(events) - _SHOWN_EVENTS
        shown = [*events[:few], *events[-(_SHOWN_EVENTS - few) :]]
    rows = [
        (str(event.get("time", ""))[:19].replace("T", " "), event["event"], event.get("step"), text_of(event))
        for event in shown
    ]
    note = (
        paragraph(f"{left_out} events in the middle are left out; all are in events/ of the run.") if left_out else ""
    )
    return table_html(("time (UTC)", "event", "step", "what"), rows, text_columns=4) + note
