"""The queue: all jobs of this user, asked for in one question, at most every few seconds, whoever wants to know.

On a login node many `gradus runs` and `gradus watch` may look at once. They share one answer, in a small file, so that
the controller, which schedules jobs for everybody, hears of none of them more often than of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gradus.launcher.slurm.commands import JobState, SlurmError, run_slurm, slurm_moment
from gradus.launcher.slurm.description import JOBS_FILE
from gradus.record.append_log import read_lines
from gradus.record.directory import RunDirectory

# Nobody waits for a state to the second; sites ask users not to poll more often than this.
FRESH_SECONDS = 5.0
_PATIENCE_SECONDS = 20.0
# What any version prints. The script's path may have anything in it, and comes last.
_FORMAT = "%i|%T|%r|%P|%N|%D|%V|%S|%e|%l|%o"
_MOMENTS = ("submitted_at", "starts_at", "ends_at")


@dataclass(frozen=True)
class Queue:
    """The jobs of this user at a moment; those that ended minutes ago are still among them."""

    jobs: Mapping[str, JobState]
    asked_at: datetime
    problem: str | None = None  # why it is not of now: Slurm does not answer

    def find(self, job_id: str) -> JobState | None:
        return self.jobs.get(job_id)


@dataclass(frozen=True)
class Submission:
    """A line of `job/jobs.jsonl`: a job that was submitted for a run."""

    job_id: str
    submitted_at: datetime
    after: str | None = None  # the job that it goes on from


def submissions(run: RunDirectory) -> list[Submission]:
    """The jobs of a run, oldest first."""
    found = []
    for record in read_lines(run.job / JOBS_FILE).records:
        with contextlib.suppress(KeyError, ValueError, TypeError):
            after = record.get("after")
            moment = datetime.fromisoformat(str(record["submitted_at"]))
            found.append(Submission(str(record["job_id"]), moment, None if after is None else str(after)))
    return found


def queue(fresh_seconds: float = FRESH_SECONDS) -> Queue:
    """The queue as of so many seconds ago at most; an older one, with the problem, while Slurm does not answer."""
    with _shared() as file:
        known = _read(file)
        if known is not None and time.time() - known.asked_at.timestamp() < fresh_seconds:
            return known
        found = _asked(known)
        _write(file, found)
        return found


def jobs_in_lines(text: str) -> dict[str, JobState]:
    """The jobs in what squeue prints in this module's format."""
    jobs = {}
    for line in text.splitlines():
        parts = line.split("|", 10)
        if len(parts) < 11:
            continue
        job_id, state, reason, partition, nodes, count, submitted, starts, ends, limit, command = parts
        jobs[job_id] = JobState(
            job_id,
            state,
            reason,
            partition,
            nodes,
            int(count) if count.isdecimal() else 0,
            submitted_at=slurm_moment(submitted),
            starts_at=slurm_moment(starts),
            ends_at=slurm_moment(ends),
            time_limit=limit,
            command=command,
        )
    return jobs


def _asked(known: Queue | None) -> Queue:
    now = datetime.now(timezone.utc)
    command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", f"--format={_FORMAT}"]
    try:
        return Queue(jobs_in_lines(run_slurm(command, timeout=_PATIENCE_SECONDS)), now)
    except SlurmError as error:
        # Remembered too: a controller that is down is not asked more often than one that is up.
        return Queue(known.jobs if known else {}, now, error.message)


def _read(file: Path) -> Queue | None:
    try:
        document = json.loads(file.read_text())
        jobs = {job_id: _job(record) for job_id, record in document["jobs"].items()}
        return Queue(jobs, datetime.fromisoformat(document["asked_at"]), document["problem"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _job(record: dict[str, Any]) -> JobState:
    known = {entry.name: record[entry.name] for entry in fields(JobState) if entry.name in record}
    moments = {name: datetime.fromisoformat(known[name]) if known.get(name) else None for name in _MOMENTS}
    return JobState(**{**known, **moments})


def _write(file: Path, found: Queue) -> None:
    jobs = {job_id: {**asdict(job), **_texts(job)} for job_id, job in found.jobs.items()}
    document = {"asked_at": found.asked_at.isoformat(), "problem": found.problem, "jobs": jobs}
    with contextlib.suppress(OSError):  # a full disk: then everybody asks
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(document))
        temporary.replace(file)


def _texts(job: JobState) -> dict[str, str | None]:
    moments = {name: getattr(job, name) for name in _MOMENTS}
    return {name: moment.isoformat() if moment else None for name, moment in moments.items()}


@contextlib.contextmanager
def _shared() -> Iterator[Path]:
    """The file with the last answer, held by one asker at a time: the others wait, and then have its answer."""
    which = "|".join(os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS"))
    name = f"queue-{hashlib.sha256(which.encode()).hexdigest()[:12]}.json"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradus"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (cache / f"{name}.lock").open("a")
    except (OSError, RuntimeError):  # no home, or a full one: no sharing
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / name
        return
    with lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache / name
