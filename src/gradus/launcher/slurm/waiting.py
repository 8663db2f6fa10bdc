"""Waiting for a submitted run: until its job has left the queue for good, however often it comes back."""

from __future__ import annotations

import time
from dataclasses import replace

from gradus.launcher.ledger import read_ledger
from gradus.launcher.result import Result
from gradus.launcher.slurm.queue import queue
from gradus.launcher.slurm.standing import Standing, standing
from gradus.record.directory import RunDirectory
from gradus.record.display import Display
from gradus.record.status import read_status
from gradus.schema.errors import EXIT_FAILED, EXIT_STOPPED

_LOOK_EVERY_SECONDS = 2.0
_SHOW_EVERY_SECONDS = 0.5
# A job that is being requeued may for a moment be neither here nor there: it is over when it is so twice.
_LOOKS = 2


def wait_for(run: RunDirectory, *, steps: int | None = None, quiet: bool = False) -> Result:
    """Follow a run until no job of it is in the queue, and say how it ended."""
    display = None if quiet else Display(run, steps)
    told, over = "", 0
    try:
        while True:
            now = standing(run, read_status(run), queue())
            if display and (words := _words(run, now)) != told:
                display.say(words)
                told = words
            over = over + 1 if _is_over(run, now) else 0
            if over >= _LOOKS:
                return result_of_run(run, now)
            until = time.monotonic() + _LOOK_EVERY_SECONDS
            while time.monotonic() < until:
                if display:
                    display.poll()
                time.sleep(_SHOW_EVERY_SECONDS)
    finally:
        if display:
            display.close()


def result_of_run(run: RunDirectory, now: Standing) -> Result:
    """How a run ended that is in no queue any more. The ledger has the last word on whether it may be started again."""
    result = Result.load(run.path)
    lines = read_ledger(run)
    last = lines[-1] if lines and lines[-1].ended.attempt == max(run.attempts, default=0) else None
    if now.state == "queued":  # and held, by whoever stopped it
        return replace(result, state="stopped", exit_code=EXIT_STOPPED, reason=last.verdict.reason if last else None)
    if now.state == "lost":
        error = {
            "kind": "lost",
            "message": now.note or "the job is gone",
            "hint": f"gradus runs why {run.name}/{run.id}",
        }
        return replace(result, state="lost", exit_code=EXIT_FAILED, error=result.error or error)
    if last is not None:
        result = replace(result, exit_code=last.verdict.exit_code)
    return result if result.exit_code is not None else replace(result, state=now.state, exit_code=EXIT_FAILED)


def _is_over(run: RunDirectory, now: Standing) -> bool:
    if now.job is not None and not now.job.is_over:
        lines = read_ledger(run)
        return now.job.waits and now.job.is_held and bool(lines) and lines[-1].verdict.decision == "hold"
    return now.state in ("finished", "failed", "stopped", "lost")


def _words(run: RunDirectory, now: Standing) -> str:
    if now.reason is not None:
        start = f"; it may start at {now.starts_at:%Y-%m-%d %H:%M}" if now.starts_at else ""
        return f"{run.name}: job {now.job_id} waits: {now.reason.text}{start}"
    job = f"job {now.job_id}" if now.job_id else "the job"
    where = f" on {now.job.nodes}" if now.job and now.job.nodes else ""
    return f"{run.name}: {job}: {now.state}{where}" + (f" ({now.note})" if now.note else "")
