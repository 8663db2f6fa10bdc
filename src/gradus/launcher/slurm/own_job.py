"""The job that this process is part of: what Slurm says of it, and how it goes back into the queue."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from gradus.launcher.ledger import excluded as excluded_by_verdicts
from gradus.launcher.slurm.commands import JobState, SlurmError, answered, job_state, passes, records, run_slurm
from gradus.launcher.slurm.description import JOBS_FILE, SCRIPT_FILE, JobDescription
from gradus.launcher.slurm.options import submission_variables
from gradus.record.append_log import read_lines
from gradus.record.directory import RunDirectory

# A controller that is being restarted is back within minutes; a job that gave up then would be lost for good.
_PATIENCE_SECONDS = 900.0
_SHORT_PATIENCE_SECONDS = 20.0


def own_job(job_id: int) -> JobState | None:
    """What the controller says of a job; None where it does not answer."""
    try:
        return job_state(_name(job_id), retry_seconds=_SHORT_PATIENCE_SECONDS)
    except SlurmError:
        return None


def gpus_of_job(job_id: int, nodes: int) -> int | None:
    """How many GPUs a job has on each node; None where the controller does not say."""
    try:
        found = records(run_slurm(["scontrol", "show", "job", _name(job_id)], retry_seconds=_SHORT_PATIENCE_SECONDS))
    except SlurmError:
        return None
    fields = found[0] if found else {}
    on_each = re.search(r"gpu(?::[^:,=]+)?[:=](\d+)", fields.get("TresPerNode", ""))  # as it was asked for
    in_all = re.search(r"gres/gpu=(\d+)", fields.get("AllocTRES", fields.get("TRES", "")))  # where the site counts them
    if on_each:
        return int(on_each[1])
    return int(in_all[1]) // nodes if in_all else None


def node_address(name: str) -> str:
    """The address at which Slurm itself reaches a node; its name where Slurm has nothing better."""
    try:
        found = records(run_slurm(["scontrol", "show", "node", name], retry_seconds=_SHORT_PATIENCE_SECONDS))
    except SlurmError:
        return name
    return found[0].get("NodeAddr", name) if found else name


def requeue(job_id: int, *, on_hold: bool = False) -> bool:
    """Put the job back into the queue, which ends this process. False: the site does not allow that."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ignored until now: Slurm would wait for a kill
    try:
        run_slurm(["scontrol", "requeuehold" if on_hold else "requeue", _name(job_id)], retry_seconds=_PATIENCE_SECONDS)
    except SlurmError as error:
        if passes(error):
            raise
        return False
    time.sleep(_PATIENCE_SECONDS)
    return False  # it was to end this process, and has not


def goes_back(job_id: int, restart: int) -> bool:
    """Whether Slurm itself has put the job back into the queue, as after the death of a node or a preemption.

    Its processes then live on for KillWait. `restart` is how often the job had been restarted when they began.
    """
    job = own_job(job_id)
    return job is not None and job.restarts > restart


def change_requeued(run: RunDirectory, job_id: int, exclude: Sequence[str] = (), *, on_hold: bool = False) -> None:
    """What is to be so when a job starts again that Slurm has put back into the queue."""
    if exclude:
        left_out = nodes_left_out(JobDescription.load(run).sbatch_options, [*excluded(run), *exclude])
        command = ["scontrol", "update", f"JobId={_name(job_id)}", f"ExcNodeList={left_out}"]
        run_slurm(command, retry_seconds=_SHORT_PATIENCE_SECONDS)
    if on_hold:
        run_slurm(["scontrol", "uhold", _name(job_id)], retry_seconds=_PATIENCE_SECONDS)


def take_back(job_id: int) -> None:
    """Take the job out of the queue into which Slurm has put it: nothing is left to do."""
    run_slurm(["scancel", _name(job_id)], retry_seconds=_PATIENCE_SECONDS)


def chain(run: RunDirectory, after: int, exclude: Sequence[str] = (), *, on_hold: bool = False) -> str:
    """Submit the same script once more, to start when this job has ended; on other nodes than those."""
    earlier = excluded(run)
    try:
        return _chained(run, after, list(dict.fromkeys([*earlier, *exclude])), on_hold)
    except SlurmError as error:
        if exclude or not earlier or passes(error):
            raise
        return _chained(run, after, [], on_hold)  # as it turns out, the job cannot do without nodes that are suspect


def _chained(run: RunDirectory, after: int, left_out: list[str], on_hold: bool) -> str:
    header = JobDescription.load(run).sbatch_options
    # What is said here wins over the header; the start that it waited for is past.
    options = [f"--dependency=afterany:{_name(after)}", "--begin=now"]
    options += [f"--exclude={nodes_left_out(header, left_out)}"] if left_out else []
    options += ["--hold"] if on_hold else []
    task = os.environ.get("SLURM_ARRAY_TASK_ID")  # of a sweep, only this run goes on
    options += [f"--array={task}"] if task else []
    command = ["sbatch", "--parsable", *options, str(run.job / SCRIPT_FILE)]
    answer = answered(command, retry_seconds=_PATIENCE_SECONDS, environment=submission_variables(header))
    job_id = answer.out.strip().partition(";")[0] + (f"_{task}" if task else "")
    note_job(run, job_id, after, left_out)
    return job_id


def nodes_left_out(header: Sequence[str], exclude: Sequence[str]) -> str:
    """Nodes to go on without, as Slurm takes them. The header's own are repeated: what comes later replaces those."""
    avoided = [option.removeprefix("--exclude=") for option in header if option.startswith("--exclude=")]
    return ",".join(dict.fromkeys([*avoided, *exclude]))


def excluded(run: RunDirectory) -> list[str]:
    """All nodes that the run goes on without: by verdicts on attempts, or by preflights, before there is one."""
    of_jobs = [name for line in read_lines(run.job / JOBS_FILE).records for name in line.get("exclude") or ()]
    return list(dict.fromkeys([*excluded_by_verdicts(run), *of_jobs]))


def _name(job_id: int) -> str:
    """The job as commands know it. The last task of an array has the array's own number, which stands for all of it."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else str(job_id)


def note_job(run: RunDirectory, job_id: str, after: int | None = None, exclude: Sequence[str] = ()) -> None:
    """A line for each job that was submitted for this run, with the nodes that it is to do without."""
    line = {"job_id": job_id, "submitted_at": datetime.now(timezone.utc).isoformat(timespec="seconds"), "after": after}
    with (run.job / JOBS_FILE).open("a") as file:
        file.write(json.dumps({**line, "exclude": list(exclude)}) + "\n")
