"""How `gradus watch` shows a run: as many lines as fit on a terminal, a line now and then elsewhere, or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from gradus.launcher.ledger import Settled
from gradus.launcher.watching import View
from gradus.record.format import bytes_text, count_text, duration_text, first_line, number_text, rate_text
from gradus.record.loss_curve import sparkline
from gradus.record.node_health import NodeHealth

if TYPE_CHECKING:
    from rich.console import Group

_BAR = 20
_SPARKLINE = 32
_STALE_SECONDS = 60.0  # health is written every few seconds; as old as this, its writer is gone or stuck
_SHOWN_ATTEMPTS = 5
_SHOWN_NODES = 8
_SHOWN_EVENTS = 6
_ALL = 1000
_LEAST_LINES = 2  # of each list, on a terminal that is not high
_STYLES = {"running": "green", "finished": "green", "failed": "red", "lost": "red", "queued": "yellow"}
_REPORT_SECONDS = 5.0  # between two reports of a rank, as faults.watcher.Rhythm has it
_BEHIND = 2  # steps: with fewer, a rank is merely not yet told of the next one

Line = tuple[str, str]  # a label, empty for a further line of the same, and text


def view_lines(view: View, height: int | None = None) -> list[Line]:
    """What there is to see, most important first; of lists as much as fits."""
    top = [("", _title(view)), *_told(view), ("step", _step_text(view)), *_loss_lines(view), *_speed_lines(view)]
    top += [("goodput", text)] if (text := _goodput_text(view)) else []
    top += [("saved", _saved_text(view))]
    lists = [
        (_attempt_lines(view), "attempts", _SHOWN_ATTEMPTS),
        (_node_lines(view), "nodes", _SHOWN_NODES),
        (_event_lines(view), "events", _SHOWN_EVENTS),
    ]
    room = _ALL if height is None else height - len(top) - 1
    for number, (lines, label, most) in enumerate(lists):
        for_others = sum(min(len(others), _LEAST_LINES) for others, _, _ in lists[number + 1 :])
        shown = max(0, min(most, room - for_others))
        kept = _worst_of_nodes(lines, shown) if label == "nodes" else lines[max(0, len(lines) - shown) :]
        top += [("" if at else label, text) for at, text in enumerate(kept)]
        room -= len(kept)
    return top


def _worst_of_nodes(lines: list[str], shown: int) -> list[str]:
    if len(lines) <= shown or shown == 0:
        return lines[:shown]
    return [*lines[: shown - 1], f"… and {len(lines) - shown + 1} nodes more, which do better"]


def as_text(view: View) -> str:
    """All of it, for who looks once."""
    (_, title), *lines = view_lines(view)
    return "\n".join([title, *(f"{label:<9}{text}" for label, text in lines)])


def as_renderable(view: View, height: int) -> Group:
    """The same on a terminal: each line cut where the terminal ends."""
    from rich.console import Group
    from rich.text import Text

    (_, title), *lines = view_lines(view, height)
    texts = [Text(title, _STYLES.get(view.state, ""), no_wrap=True, overflow="ellipsis")]
    for label, said in lines:
        line = Text(f"{label:<9}", "dim", no_wrap=True, overflow="ellipsis")
        texts.append(line.append(said, "bold red" if label == "error" else "not dim"))
    return Group(*texts)


def as_line(view: View) -> str:
    """One line for a log: what changes from one look to the next."""
    parts = [f"{view.at:%H:%M:%S}", view.state, *([f"attempt {view.attempt}"] if view.attempt > 1 else [])]
    if view.state == "queued":
        return "  ".join([*parts, *([view.note] if view.note else [])])
    parts.append(_step_text(view, bar=False))
    if view.loss is not None:
        parts.append(f"loss {number_text(view.loss)}")
    if view.speed is not None:
        parts.append(rate_text(view.speed.per_second, view.speed.unit))
    if view.goodput is not None and view.goodput.share is not None:
        parts.append(f"goodput {view.goodput.share:.0%}")
    worst = view.health.nodes[0] if view.health and view.health.nodes else None
    if worst is not None and _is_unwell(worst):
        parts.append(_node_text(worst))
    return "  ".join(parts)


def as_document(view: View) -> dict[str, Any]:
    """As `--json` prints it."""
    speed, goodput, health = view.speed, view.goodput, view.health
    return {
        "run": str(view.run.path),
        "state": view.state,
        "over": view.over,
        "exit_code": view.exit_code,
        "note": view.note,
        "attempt": view.attempt,
        "job_id": view.job_id,
        "starts_at": _iso(view.starts_at),
        "ends_at": _iso(view.ends_at),
        "step": view.step,
        "steps_total": view.steps_total,
        "loss": view.loss,
        f"{_SPEED_NAMES[speed.unit]}_per_second" if speed else "samples_per_second": speed.per_second
        if speed
        else None,
        "predicted_per_second": speed.predicted if speed else None,
        "step_seconds": view.step_seconds,
        "eta_seconds": view.eta_seconds,
        "goodput": goodput.document() if goodput else None,
        "saved_step": view.saved_step,
        "saved_at": _iso(view.saved_at),
        "attempts": [{**asdict(line.ended), **asdict(line.verdict)} for line in view.attempts],
        "nodes": [asdict(node) for node in health.nodes] if health else [],
        "stragglers": [asdict(one) for one in health.stragglers] if health else [],
        "health_at": _iso(health.time) if health else None,
        "last_error": view.last_error,
        "events": [dict(event) for event in view.events],
    }


_SPEED_NAMES = {"tok": "tokens", "samples": "samples"}


def _title(view: View) -> str:
    parts = [f"{view.run.name}/{view.run.id}", view.state]
    if view.attempt:
        parts.append(f"attempt {view.attempt}")
    if view.job_id:
        parts.append(f"job {view.job_id}{f' on {view.job_nodes}' if view.job_nodes else ''}")
    return " · ".join(parts)


def _told(view: View) -> list[Line]:
    lines: list[Line] = []
    if view.note:
        lines.append(("why" if view.state == "queued" else "note", view.note))
    if view.state == "queued" and view.starts_at is not None:
        left = (view.starts_at - view.at).total_seconds()
        when = f", in {duration_text(left)}" if left > 0 else ""
        lines.append(("starts", f"{view.starts_at:%Y-%m-%d %H:%M:%S} as far as Slurm knows{when}"))
    if view.last_error and view.state in ("failed", "lost"):
        lines.append(("error", first_line(view.last_error)))
    return lines


def _step_text(view: View, *, bar: bool = True) -> str:
    total = view.steps_total
    text = f"{view.step}" if total is None else f"{view.step}/{total}"
    text = text if bar else f"step {text}"
    if bar and total:
        full = round(_BAR * min(1.0, view.step / total))
        text += f"  {'━' * full}{'╌' * (_BAR - full)} {view.step / total:.0%}"
    if view.eta_seconds is not None and view.state in ("running", "starting"):
        text += f"  ETA {duration_text(view.eta_seconds)}"
    if view.ends_at is not None and view.state == "running":
        left = (view.ends_at - view.at).total_seconds()
        until = f"job ends in {duration_text(left)}" if left > 0 else "the job's time is over"
        early = ", before the run does" if view.eta_seconds is not None and left < view.eta_seconds else ""
        text += f"  {until}{early}"
    return text


def _loss_lines(view: View) -> list[Line]:
    if view.loss is None:
        return []
    return [("loss", f"{number_text(view.loss)}  {sparkline(view.losses, _SPARKLINE)}")]


def _speed_lines(view: View) -> list[Line]:
    speed = view.speed
    if speed is None:
        return []
    text = rate_text(speed.per_second, speed.unit)
    if speed.predicted is None or speed.share is None:
        return [("speed", f"{text}; no prediction")]
    return [("speed", f"{text}, {speed.share:.0%} of the predicted {rate_text(speed.predicted, speed.unit)}")]


def _goodput_text(view: View) -> str | None:
    found = view.goodput
    if found is None or found.share is None:
        return None
    lost = (
        f"; {count_text(found.lost_steps, 'step')} {'was' if found.lost_steps == 1 else 'were'} lost"
        if found.lost_steps
        else ""
    )
    waited = f"; waited {duration_text(found.waiting_seconds)} between jobs" if found.waiting_seconds >= 1 else ""
    return f"{found.share:.0%} of {duration_text(found.allocated_seconds)}{lost}{waited}"


def _saved_text(view: View) -> str:
    if view.saved_step is None:
        return "nothing yet"
    age = f", {duration_text(max(0.0, (view.at - view.saved_at).total_seconds()))} ago" if view.saved_at else ""
    return f"step {view.saved_step}{age}"


def _attempt_lines(view: View) -> list[str]:
    return [_attempt_text(line) for line in view.attempts]


def _attempt_text(line: Settled) -> str:
    ended = line.ended
    text = f"{ended.attempt}: {ended.state}" + (f" at step {ended.step_reached}" if ended.counts_steps else "")
    decided = line.verdict
    return text if decided.decision == "finished" else f"{text} → {decided.decision}: {decided.reason}"


def _node_lines(view: View) -> list[str]:
    health = view.health
    if health is None:
        return []
    lines = [_node_text(node) for node in health.nodes]
    age = (view.at - health.time).total_seconds() if health.time is not None else None
    if age is not None and age > _STALE_SECONDS:
        lines.insert(0, f"as they were {duration_text(age)} ago: nothing newer was written")
    return lines


def _is_unwell(node: NodeHealth) -> bool:
    return bool(node.silent or node.slowest_ratio or _is_behind(node))


def _is_behind(node: NodeHealth) -> bool:
    """Reports are of different ages: one that comes on is only told of earlier than the others."""
    return node.behind > _BEHIND and node.phase_seconds >= _REPORT_SECONDS


def _node_text(node: NodeHealth) -> str:
    parts = [f"{node.node}: {count_text(node.ranks, 'rank')} at step {node.step}"]
    if node.silent:
        parts.append(f"{node.silent} silent")
    if node.slowest_ratio:
        parts.append(f"a rank is {node.slowest_ratio:.1f}× as slow as usual")
    if _is_behind(node):
        parts.append(f"{count_text(node.behind, 'step')} behind")
    parts.append(f"{node.phase} for {duration_text(node.phase_seconds)}")
    if node.memory_peak_bytes:
        parts.append(bytes_text(node.memory_peak_bytes))
    return ", ".join(parts)


def _event_lines(view: View) -> list[str]:
    return [event_text(event) for event in view.events]


def event_text(event: Mapping[str, Any]) -> str:
    """`12:34:56  restart  attempt 2 …`: an event in a line."""
    try:
        when = f"{datetime.fromisoformat(str(event.get('time'))).astimezone(timezone.utc):%H:%M:%S}"
    except ValueError:
        when = "--:--:--"
    error = event.get("error")
    told = event.get("message") or event.get("reason") or (error.get("message") if isinstance(error, Mapping) else None)
    step = f"step {event['step']}" if event.get("step") is not None else None
    decision = event.get("decision") or event.get("state") or event.get("kind")
    parts = [when, str(event.get("event", "?")), decision, step, told]
    return "  ".join(first_line(part) for part in parts if part and str(part).strip())


def _iso(moment: datetime | None) -> str | None:
    return moment.isoformat(timespec="seconds") if moment is not None else None
