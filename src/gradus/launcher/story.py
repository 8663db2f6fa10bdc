"""The story of a run: how it is, why, what was decided after each attempt, and what to do next."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gradus.checkpoint.manifest import committed_steps
from gradus.launcher.attempt import is_of_a_script
from gradus.launcher.error_signature import place_in_users_code
from gradus.launcher.job_place import read_place
from gradus.launcher.ledger import Settled, counts_steps, read_ledger
from gradus.launcher.result import Result
from gradus.launcher.run_logs import job_outputs, last_lines
from gradus.launcher.slurm.queue import queue, submissions
from gradus.launcher.slurm.reasons import Reason, ended_words
from gradus.launcher.slurm.standing import Standing, standing
from gradus.launcher.verdict import GOES_ON
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.format import count_text, duration_text, first_line
from gradus.record.status import Status, read_status, shown_state, writer_is_gone

_LAST_WORDS = 8  # lines


@dataclass(frozen=True)
class Story:
    """What `gradus runs why` tells."""

    state: str
    lines: list[str]
    next_steps: list[str]
    details: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {"state": self.state, **self.details, "story": self.lines, "next": self.next_steps}

    def text(self) -> str:
        advice = ["", "what to do", *(f"  {line}" for line in self.next_steps)] if self.next_steps else []
        return "\n".join([*self.lines, *advice])


def story_of(run: RunDirectory) -> Story:
    status = read_status(run)
    submitted = bool(submissions(run))
    now = standing(run, status, queue(0), thorough=True) if submitted else Standing(local_state(status))
    decided = read_ledger(run)
    result = Result.load(run.path)
    lines = [f"{run.name}/{run.id}: {now.state}", *_of_the_job(now), *_of_the_steps(run, status)]
    by_hand = _started_by_hand(run)
    lines += [_of_an_attempt(line, by_hand.get(line.ended.attempt + 1)) for line in decided]
    lines += _of_a_cancel(run)
    if result.error and not (decided and decided[-1].ended.error_message == result.error.get("message")):
        lines.append(f"last error: {str(result.error['message']).strip()}")
    elif status is not None and status.last_error and not decided:
        lines.append(f"last error: {status.last_error}")
    if result.error and (place := place_in_users_code(str(result.error.get("traceback") or ""))):
        lines.append(f"it was raised in {place}")
    lines += _last_words(run, now)
    return Story(now.state, lines, _next_steps(run, now, decided, submitted), _details(now, decided, result))


def local_state(status: Status | None) -> str:
    """The state of a run that no scheduler knows. Whose process is gone from this machine is lost at once."""
    if status is None:
        return "unknown"
    state = shown_state(status)
    return "lost" if state == "running" and writer_is_gone(status) else state


def _of_the_job(now: Standing) -> list[str]:
    if now.reason is not None:
        lines = [f"job {now.job_id} waits: {now.reason.text}{_waited_for(now)}"]
        if now.starts_at is not None:
            lines.append(f"Slurm expects to start it at {_moment(now.starts_at)}")
        return lines
    if now.note is not None:
        ended = ended_words(now.job.state) if now.job is not None and now.job.is_over else None
        return [now.note + (f": {ended}" if ended else "")]
    if now.job is not None and not now.job.is_over:
        until = f", until {_moment(now.job.ends_at)}" if now.job.ends_at else ""
        return [f"job {now.job_id} is on {now.job.nodes}{until}"]
    return [f"job {now.job_id} is over"] if now.job_id else []


def _of_the_steps(run: RunDirectory, status: Status | None) -> list[str]:
    saved = max(committed_steps(run.checkpoints), default=None)
    if status is None or not run.attempts:
        return ["it has not begun yet"]
    total = f" of {status.steps_total}" if status.steps_total else ""
    kept = f"saved at step {saved}" if saved is not None else "nothing is saved"
    count = len(run.attempts)
    attempts = count_text(count, "attempt")
    if not counts_steps(run, run.attempts[-1]):
        return [f"{attempts} at a script that does not say how far it gets"]
    return [f"{attempts}, at step {status.step}{total}, {kept}"]


def _started_by_hand(run: RunDirectory) -> dict[int, str]:
    """The attempts that were the first of a job that a person submitted to go on with the run, with those jobs."""
    typed = {one.job_id for one in submissions(run)[1:] if one.after is None}
    jobs = {attempt: str(place.job_id) for attempt in run.attempts if (place := read_place(run, attempt)) is not None}
    return {attempt: job for attempt, job in jobs.items() if job in typed and jobs.get(attempt - 1) != job}


def _of_a_cancel(run: RunDirectory) -> list[str]:
    """Of a run that was taken out of the queue: what the ledger says may be from before."""
    told = [event for event in read_events(run) if event.get("writer") == "submit"]
    if not told or told[-1]["event"] != "cancel":
        return []
    return [f"job {told[-1].get('job_id')} was taken out of the queue by {told[-1].get('by', 'gradus runs cancel')!r}"]


def _of_an_attempt(line: Settled, next_by_hand: str | None = None) -> str:
    """How it ended and what was decided; `next_by_hand` is the job in which a person started the next one."""
    ended = line.ended
    where = f" on {','.join(ended.nodes)}" if ended.nodes else ""
    how_far = f" at step {ended.step_reached}" if ended.counts_steps else ""
    if line.verdict.decision == "finished":
        return f"attempt {ended.attempt}{where}: finished{how_far}"
    why = ended.error_message or ended.stop_reason
    because = f" ({first_line(why)})" if why else ""
    decided = line.verdict.decision
    follows = f"over: {line.verdict.reason}" if ended.for_good else f"{decided}: {line.verdict.reason}"
    if next_by_hand is not None and decided in GOES_ON:  # what was decided for a job that was not there any more
        follows = f"started again by hand, as job {next_by_hand}"
    return f"attempt {ended.attempt}{where}: {ended.state}{how_far}{because}; {follows}"


def _last_words(run: RunDirectory, now: Standing) -> list[str]:
    """Of a job that ended before a rank could say anything: what its shell printed."""
    if now.state not in ("lost", "failed") or (run.attempts and now.state == "failed"):
        return []
    outputs = job_outputs(run)
    words = last_lines(outputs[-1], _LAST_WORDS) if outputs else []
    return [f"last words of the job ({outputs[-1]}):", *(f"  {line}" for line in words)] if words else []


def _next_steps(run: RunDirectory, now: Standing, decided: list[Settled], submitted: bool) -> list[str]:
    name = f"{run.name}/{run.id}"
    resume = f"gradus submit --resume {name}" if submitted else f"gradus train --resume {name}"
    if now.state == "queued":
        advice = [_advice(now.reason, name, now.job_id)] if now.reason and now.reason.advice else []
        return [*advice, f"gradus runs cancel {name} takes it out of the queue"]
    if now.state in ("running", "starting"):
        return [f"gradus watch {name}", f"gradus runs logs {name} --follow"]
    if now.state == "finished":
        return [f"gradus runs {name}"]
    if now.state == "lost":
        saved = committed_steps(run.checkpoints)
        from_step = f"from step {max(saved)}" if saved else "from the beginning"
        more = [f"sacct -j {now.job_id} may know more, where the site keeps accounts"] if now.job_id else []
        return [f"{resume} goes on {from_step}", *more]
    if now.state == "failed":
        hopeless = bool(decided) and decided[-1].verdict.decision == "give-up"
        first = "mend what is told above: as it is, it would fail again" if hopeless else f"gradus runs logs {name}"
        return [first, f"{resume} goes on afterwards"]
    if now.state == "stopped":
        return [f"{resume} goes on"]
    return [f"gradus runs logs {name}"] if not _is_script(run) else []


def _is_script(run: RunDirectory) -> bool:
    return bool(run.attempts) and is_of_a_script(run)


def _details(now: Standing, decided: list[Settled], result: Result) -> dict[str, Any]:
    reason, name = now.reason, f"{result.run.name}/{result.run.id}"
    return {
        "run": str(result.run.path),
        "job_id": now.job_id,
        "reason": _reason_document(reason, name, now.job_id) if reason else None,
        "starts_at": now.starts_at.isoformat() if now.starts_at else None,
        "note": now.note,
        "error": result.error,
        "attempts": [
            {
                "attempt": line.ended.attempt,
                "state": line.ended.state,
                "step": line.ended.step_reached,
                "nodes": list(line.ended.nodes),
                "error": line.ended.error_message,
                "decision": line.verdict.decision,
                "reason": line.verdict.reason,
            }
            for line in decided
        ],
    }


def _reason_document(reason: Reason, name: str, job_id: str | None) -> dict[str, str]:
    return {"slurm": reason.slurm, "words": reason.words, "advice": _advice(reason, name, job_id)}


def _advice(reason: Reason, name: str, job_id: str | None) -> str:
    return reason.advice.replace("RUN", name).replace("JOB", job_id or "JOB")


def _waited_for(now: Standing) -> str:
    """`: jobs 12, 13`: the jobs that a job waits for, where Slurm says so."""
    jobs = re.findall(r":(\d+(?:_\d+)?)", now.job.dependency if now.job is not None else "")
    return f": job{'s' if len(jobs) > 1 else ''} {', '.join(jobs)}" if jobs else ""


def _moment(at: datetime) -> str:
    left = (at - datetime.now(at.tzinfo)).total_seconds()
    return f"{at:%Y-%m-%d %H:%M:%S}" + (f", in {duration_text(left)}" if left > 0 else "")
