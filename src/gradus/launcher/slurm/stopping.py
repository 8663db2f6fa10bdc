"""Stopping a run that Slurm has: held while it waits, asked to save while it runs, or taken out of the queue."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from gradus.launcher.ending import note_end_at_once
from gradus.launcher.slurm.commands import JobState, SlurmError, is_unknown_job, job_state, run_slurm
from gradus.launcher.slurm.description import JobDescription
from gradus.launcher.slurm.queue import queue, submissions
from gradus.launcher.slurm.standing import Standing, standing
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter
from gradus.record.status import read_status, write_status
from gradus.record.stop import request_stop
from gradus.schema.errors import InputError

# Both are requests by people, after which a run is not continued: the verdict knows them by these words.
STOP = "gradus runs stop"
CANCEL = "gradus runs cancel"
_LOOK_EVERY_SECONDS = 1.0
_GONE_AFTER_SECONDS = 120.0  # Slurm's own KillWait and UnkillableStepTimeout are 30 and 60 s where nobody set them


@dataclass(frozen=True)
class Stopped:
    """What was done, as JSON has it and as people read it."""

    did: str
    words: str


def stop(run: RunDirectory) -> Stopped:
    """Ask a run to save and stop; one that waits is held. Either stays so until somebody releases it."""
    now = _standing(run)
    release = f"gradus runs release {run.name}/{run.id} lets it go on"
    if now.job is not None and now.job.waits:
        if now.job.is_held:
            return Stopped("held", f"job {now.job_id} is held already; {release}")
        run_slurm(["scontrol", "uhold", str(now.job_id)], retry_seconds=10)
        after = job_state(str(now.job_id))
        if after is None or after.waits:
            _tell(run, "hold", now.job_id)
            return Stopped("held", f"job {now.job_id} waits and is now held; {release}")
    elif not now.in_queue:
        raise _not_there(run, now)
    request_stop(run, STOP)
    return Stopped("stop", f"{run.name}/{run.id} was asked to save and stop; its job is then held, and {release}")


def release(run: RunDirectory) -> Stopped:
    """Let a run go on that is held."""
    now = _standing(run)
    if now.job is None or not now.job.waits:
        raise _not_there(run, now)
    if not now.job.is_held:
        raise InputError(
            f"job {now.job_id} is not held: {now.reason.text if now.reason else now.state}",
            hint=f"nothing is to be released; gradus runs why {run.name}/{run.id}",
            found=now.state,
            allowed="a job that is held",
        )
    run_slurm(["scontrol", "release", str(now.job_id)], retry_seconds=10)
    _tell(run, "release", now.job_id)
    return Stopped("released", f"job {now.job_id} waits for its turn")


def cancel(
    run: RunDirectory, *, at_once: bool = False, grace_seconds: float | None = None, by: str = CANCEL
) -> Stopped:
    """Take a run out of the queue for good: saved, if it runs and can be within the grace; or at once."""
    now = _standing(run)
    if not now.in_queue or now.job_id is None:
        raise _not_there(run, now)
    saved = None
    if not at_once and now.job is not None and not now.job.waits:
        if grace_seconds is None:
            grace_seconds = JobDescription.load(run).lead_seconds
        request_stop(run, by)
        saved = _leaves(run, grace_seconds)
    elif now.job is not None and not now.job.waits:
        # scancel alone begins with SIGTERM, on which a run saves: it would take KillWait, and nobody knew who ended it.
        request_stop(run, by, now=True)
    # What it left behind after its save (itself, held, or another one chained to it) goes too.
    for submission in submissions(run)[-2:]:
        _scancel(submission.job_id)
    killed = now.job is not None and not now.job.waits and not saved
    _settle(run, killed, now.job_id, by)
    if now.job is not None and now.job.waits:
        return Stopped("cancelled", f"job {now.job_id} was taken out of the queue before it began")
    if saved:
        return Stopped("cancelled", f"{run.name}/{run.id} saved, and job {now.job_id} was taken out of the queue")
    return Stopped("killed", f"job {now.job_id} was ended at once")


def _standing(run: RunDirectory) -> Standing:
    found = queue(0)
    if found.problem is not None:
        raise SlurmError(found.problem, hint="try again when `scontrol ping` says UP")
    return standing(run, read_status(run), found, thorough=True)


def _leaves(run: RunDirectory, seconds: float) -> bool:
    """Whether the ranks left by themselves in time: the job is over, or waits to be continued."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        job = _job_of(run)
        if job is None or job.is_over or job.waits:
            return True
        time.sleep(_LOOK_EVERY_SECONDS)
    return False


def _job_of(run: RunDirectory) -> JobState | None:
    return job_state(submissions(run)[-1].job_id, retry_seconds=30)


def _scancel(job_id: str) -> None:
    try:
        run_slurm(["scancel", job_id], retry_seconds=30)
    except SlurmError as error:
        if not is_unknown_job(error):
            raise
    until = time.monotonic() + _GONE_AFTER_SECONDS
    while (job := job_state(job_id, retry_seconds=30)) is not None and not job.is_over and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_SECONDS)


def _settle(run: RunDirectory, killed: bool, job_id: str | None, by: str) -> None:
    _tell(run, "cancel", job_id, by=by)
    status = read_status(run)
    if status is None or status.state not in ("queued", "running", "stopped"):
        return
    if killed and status.attempt:
        note_end_at_once(run, status.attempt, by)
    else:
        write_status(run, replace(status, state="stopped", updated_at=datetime.now(timezone.utc)))


def _tell(run: RunDirectory, event: str, job_id: str | None, **more: str) -> None:
    queue(0)  # what others have in mind of the queue is of before
    events = EventWriter(run, "submit")
    events.write(event, job_id=job_id, **more)
    events.close()


def _not_there(run: RunDirectory, now: Standing) -> InputError:
    return InputError(
        f"{run.name}/{run.id} is not in the queue: {now.state}" + (f" ({now.note})" if now.note else ""),
        hint=f"gradus runs why {run.name}/{run.id}",
        found=now.state,
        allowed="queued or running",
    )
