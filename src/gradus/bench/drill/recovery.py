"""Recovery: whether and how fast a run got over what was done to it, and what it lost, from its files alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from gradus.bench.drill.injections import Injected, reached
from gradus.checkpoint.manifest import committed_steps
from gradus.launcher.ledger import read_ledger
from gradus.record.append_log import read_lines
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.status import read_status, shown_state

_LOOK_EVERY_SECONDS = 0.5
_NOTICES = ("fault", "end", "stop-request", "restart")
_OVER = ("finished", "failed", "lost")


@dataclass(frozen=True)
class Recovery:
    """What became of a run after an injection."""

    recovered: bool
    why: str
    state: str
    lost_steps: int | None = None  # that had to be computed again
    seconds_to_notice: float | None = None  # until the attempt was over, or an event told of it
    seconds_to_first_step: float | None = None  # until a step was made after it
    seconds_to_catch_up: float | None = None  # until the run was further than before

    def document(self) -> dict[str, Any]:
        return asdict(self)


def observe(run: RunDirectory, injected: Injected, patience_seconds: float, say: Callable[[str], None]) -> Recovery:
    """Follow the run until it has recovered, has ended, or patience does."""
    give_up_at = time.monotonic() + patience_seconds
    told: set[str] = set()
    rows_then, first_step_at = _rows(run, injected.attempt), None
    while True:
        if first_step_at is None and (
            _rows(run) > _rows(run, injected.attempt) or _went_back(run, injected, rows_then)
        ):
            first_step_at = time.time()
        for event in _new_events(run, injected):
            line = _line(event)
            if line not in told:
                told.add(line)
                say(line)
        recovery = judged(run, injected)
        if recovery is not None and recovery.recovered and recovery.seconds_to_catch_up is not None:
            # The step may have come since it was looked for: then it is the one that caught up.
            to_first = recovery.seconds_to_catch_up if first_step_at is None else first_step_at - injected.at
            return replace(recovery, seconds_to_first_step=to_first)
        if recovery is not None:
            return recovery
        if time.monotonic() > give_up_at:
            state = _state(run)
            return Recovery(False, f"no sign of recovery within {patience_seconds:.0f} s; the run is {state}", state)
        time.sleep(_LOOK_EVERY_SECONDS)


def judged(run: RunDirectory, injected: Injected) -> Recovery | None:
    """What is known of a recovery by now; None while that is open."""
    return {"slow-rank": _named, "disk-full": _saved_again}.get(injected.kind, _went_on)(run, injected)


def _went_on(run: RunDirectory, injected: Injected) -> Recovery | None:
    """A rank, a node, the job or the numbers failed: it is over when the run is further than it was."""
    state, events = _state(run), _new_events(run, injected)
    again = [e for e in events if e["event"] in ("resume", "rollback", "skipped-step", "start")]
    noticed = [e for e in events if e["event"] in (*_NOTICES, "rollback", "skipped-step")]
    # Steps of the attempt to which it was done count only if it went back itself: one that is to stop makes a few more.
    within = any(e["event"] in ("rollback", "skipped-step") for e in again)
    moved_on = bool(again) and (reached(run) > injected.step if within else _is_further(run, injected.attempt))
    if moved_on or (state == "finished" and again):
        first = next((e for e in again if e.get("step") is not None), again[0])
        begun = first.get("to_step", first.get("step", injected.step))
        return Recovery(
            True,
            _decision(run) or "it went on within the attempt",
            state,
            lost_steps=max(0, injected.step - int(begun)),
            seconds_to_notice=_after(injected, noticed[0]) if noticed else None,
            seconds_to_catch_up=time.time() - injected.at,
        )
    if state in _OVER and not _goes_on(run):
        nobody = "the run is lost: nobody is left here to start it again; gradus train --resume goes on with it"
        alone = state == "lost" and not run.job.is_dir()
        return Recovery(False, nobody if alone else _decision(run) or f"the run is {state}", state)
    if state == "stopped" and injected.kind in ("preempt", "timeout") and not run.job.is_dir():
        saved = max(committed_steps(run.checkpoints), default=0)
        why = f"saved at step {saved} and stopped, as it was asked to: nobody requeues a run of this machine"
        lost = max(0, reached(run) - saved)
        return Recovery(lost == 0, why, state, lost, _after(injected, noticed[0]) if noticed else None)
    return None


def _named(run: RunDirectory, injected: Injected) -> Recovery | None:
    """A slow rank is not replaced: to be told of it is all that is promised."""
    named = [e for e in _new_events(run, injected) if e["event"] == "straggler"]
    state = _state(run)
    if named:
        notice = _after(injected, named[0])
        return Recovery(True, str(named[0].get("message")), state, lost_steps=0, seconds_to_notice=notice)
    if state in _OVER:
        return Recovery(False, f"the run is {state}, and nobody named the slow rank", state)
    return None


def _saved_again(run: RunDirectory, injected: Injected) -> Recovery | None:
    """Training goes on while nothing can be saved; it is over when a checkpoint was committed again."""
    events, state = _new_events(run, injected), _state(run)
    problems = [e for e in events if e["event"] == "fault"]
    saved = max(committed_steps(run.checkpoints), default=0)
    if saved > injected.step and reached(run) > injected.step:
        why = f"step {saved} was saved; {len(problems)} problems with writing were told of"
        notice = _after(injected, problems[0]) if problems else None
        return Recovery(True, why, state, lost_steps=0, seconds_to_notice=notice)
    if state in _OVER and not _goes_on(run):
        return Recovery(False, _decision(run) or f"the run is {state}", state)
    return None


def _new_events(run: RunDirectory, injected: Injected) -> list[dict[str, Any]]:
    """In their order. A second of grace: an injection takes time, and clocks of nodes differ."""
    return [event for event in read_events(run) if _time(event) >= injected.at - 1.0]


def _rows(run: RunDirectory, up_to_attempt: int | None = None) -> int:
    """How many steps were logged, by attempts up to this one."""
    rows = [row for row in read_lines(run.metrics_path).records if row.get("loss") is not None]
    return sum(up_to_attempt is None or row["attempt"] <= up_to_attempt for row in rows)


def _is_further(run: RunDirectory, attempt: int) -> bool:
    """Whether a later attempt has made a step that this one and those before it had not."""
    rows = [row for row in read_lines(run.metrics_path).records if row.get("loss") is not None]
    before = max((row["step"] for row in rows if row["attempt"] <= attempt), default=0)
    return any(row["step"] > before for row in rows if row["attempt"] > attempt)


def _went_back(run: RunDirectory, injected: Injected, rows_then: int) -> bool:
    """Whether the attempt itself goes on after it has skipped or gone back: steps were logged since."""
    back = any(event["event"] in ("rollback", "skipped-step") for event in _new_events(run, injected))
    return back and _rows(run, injected.attempt) > rows_then + 1


def _goes_on(run: RunDirectory) -> bool:
    """Whether the ledger has decided on another attempt, or has yet to decide."""
    lines = read_ledger(run)
    if not lines or lines[-1].ended.attempt < max(run.attempts, default=0):
        return time.time() - run.status_path.stat().st_mtime < 30.0
    return lines[-1].verdict.decision in ("again", "requeue", "exclude")


def _decision(run: RunDirectory) -> str | None:
    lines = read_ledger(run)
    return f"{lines[-1].verdict.decision}: {lines[-1].verdict.reason}" if lines else None


def _state(run: RunDirectory) -> str:
    status = read_status(run)
    return shown_state(status) if status else "unknown"


def _after(injected: Injected, event: dict[str, Any]) -> float:
    return max(0.0, _time(event) - injected.at)


def _time(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(str(event["time"])).timestamp()


def _line(event: dict[str, Any]) -> str:
    said = event.get("message") or event.get("reason") or event.get("state") or ""
    return f"{str(event['time'])[11:19]}  {event['event']}" + (f": {said}" if said else "")
