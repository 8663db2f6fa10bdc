"""Standing: how a run is now, from its own files and from what the queue says of its newest job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from gradus.launcher.slurm.commands import JobState, SlurmError, job_state
from gradus.launcher.slurm.queue import Queue, Submission, submissions
from gradus.launcher.slurm.queue import queue as asked_queue
from gradus.launcher.slurm.reasons import Reason, explained_reason
from gradus.record.directory import RunDirectory
from gradus.record.status import Status, shown_state
from gradus.schema.errors import InputError

_OWN_CLOCK_SECONDS = 2.0  # `submitted_at` is in whole seconds, and is written after the job is in the queue
_UNSETTLED = ("queued", "running", "lost", "unknown")  # in which a run says that it is not over


@dataclass(frozen=True)
class Standing:
    """The state of a run as people see it, with the job that it is in or waits for."""

    state: str  # of status.json; or `starting`, or `lost`
    job_id: str | None = None
    job: JobState | None = None
    reason: Reason | None = None  # why it waits
    starts_at: datetime | None = None
    note: str | None = None  # what is odd

    @property
    def in_queue(self) -> bool:
        return self.job is not None and not self.job.is_over


def standing(run: RunDirectory, status: Status | None, queue: Queue, *, thorough: bool = False) -> Standing:
    """The standing of a run that was submitted to Slurm. `thorough` asks about its job once more, by its number."""
    jobs = submissions(run)
    state = shown_state(status) if status else "unknown"
    if not jobs:
        return Standing(state)
    newest = jobs[-1]
    job = queue.find(newest.job_id)
    if queue.problem is None and (thorough or (job is None and _is_younger(newest, queue))):
        job = _asked(newest) or job
    if job is None:
        return _without_a_job(state, newest, queue)
    if job.waits:
        # Waiting, whatever the last attempt left in status.json: it stopped to be continued.
        starts_at = None if job.is_held else job.starts_at
        return Standing("queued", newest.job_id, job, explained_reason(job.reason), starts_at)
    if not job.is_over:
        return _with_a_job(state, newest, job)
    if state in _UNSETTLED:
        how = job.state.lower().replace("_", " ")
        return Standing("lost", newest.job_id, job, note=f"job {newest.job_id} has ended ({how}) and said nothing more")
    return Standing(state, newest.job_id, job)


def check_not_in_queue(run: RunDirectory, status: Status | None) -> None:
    """Refuse a run that a job of Slurm works on, or is to."""
    if not submissions(run):
        return
    now = standing(run, status, asked_queue(0), thorough=True)
    if now.in_queue:
        raise InputError(
            f"{run.path}: the run is in the queue: job {now.job_id}, {now.state}",
            hint=f"gradus runs cancel {run.name}/{run.id} takes it out; gradus runs why {run.name}/{run.id} says more",
            found=now.state,
        )


def _asked(newest: Submission) -> JobState | None:
    try:
        return job_state(newest.job_id)
    except SlurmError:
        return None


def _is_younger(newest: Submission, queue: Queue) -> bool:
    """Whether a job may have been submitted after the queue was asked."""
    return queue.asked_at - newest.submitted_at < timedelta(seconds=_OWN_CLOCK_SECONDS)


def _with_a_job(state: str, newest: Submission, job: JobState) -> Standing:
    """Of a run whose job has nodes."""
    if state in ("queued", "stopped", "unknown"):
        return Standing("starting", newest.job_id, job, note=f"job {newest.job_id} is {job.state.lower()}")
    if state == "lost":
        note = (
            f"job {newest.job_id} runs, but there was no sign of life for a minute: it may hang, or its nodes are slow"
        )
        return Standing("running", newest.job_id, job, note=note)
    return Standing(state, newest.job_id, job)


def _without_a_job(state: str, newest: Submission, queue: Queue) -> Standing:
    if queue.problem is not None:
        return Standing(state, newest.job_id, note=f"Slurm does not answer: {queue.problem}")
    if state not in _UNSETTLED or _is_younger(newest, queue):
        return Standing(state, newest.job_id)
    note = f"job {newest.job_id} is not in the queue any more and left no word"
    return Standing("lost", newest.job_id, note=note)
