"""What a batch script asks for, between its lines: the next attempt, a stop request, and what follows an end.

`python -m gradus.launcher.slurm.job begin RUN | stop RUN SIGNAL | end RUN ATTEMPT CODE | refuse RUN CODE`
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from gradus.hardware.detect import detect_machine
from gradus.launcher.attempt import write_attempt
from gradus.launcher.ending import result_of
from gradus.launcher.job_place import JOB_FILE, read_place
from gradus.launcher.job_report import job_report
from gradus.launcher.ledger import attempt_ended, settle, unsettled
from gradus.launcher.result import Result
from gradus.launcher.run_logs import job_outputs, last_lines
from gradus.launcher.slurm.allocation import Allocation, allocation
from gradus.launcher.slurm.commands import JobState, SlurmError
from gradus.launcher.slurm.description import JobDescription, attempt_files, free_from, rendezvous_port
from gradus.launcher.slurm.node import launch_of
from gradus.launcher.slurm.node_ending import NodeEnding, departure_of, node_endings
from gradus.launcher.slurm.own_job import chain, change_requeued, goes_back, own_job, requeue, take_back
from gradus.launcher.slurm.refusal import refused_nodes
from gradus.launcher.verdict import EXIT_AGAIN, Ended, Verdict, is_of_people
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter
from gradus.record.outcome import read_outcome
from gradus.record.status import Status, read_status, write_status
from gradus.record.stop import request_stop, requested_stop
from gradus.schema.cluster import Cluster
from gradus.schema.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED, EXIT_STOPPED, GradusError

# So long the tasks of a job that is killed have for their last words: less than Slurm's default for KillWait, 30 s.
_TASKS_SECONDS = 20.0

_PREEMPTED = "preempted: a job with a higher priority takes its nodes (SIGTERM)"


def begin(run: RunDirectory) -> int:
    """Make the next attempt and print its number, and address and port at which its nodes meet.

    An attempt whose job was killed, or whose node died, has told nobody how it ended: that is settled first. If it
    turns out that there is to be no other one, nothing is printed.
    """
    here, lost = _allocation(), unsettled(run)
    if lost is not None:
        followed = _settle_lost(run, lost, here)
        if followed != EXIT_AGAIN:
            return followed
    files = {**attempt_files(run.job), JOB_FILE: here.place(None).to_json()}
    cluster, machine = Cluster.load(run.job / "cluster.yaml"), detect_machine()
    asked = requested_stop(run)
    if asked is not None and is_of_people(asked):  # while the job was starting, when no rank could answer
        verdict = Verdict("hold", f"asked to stop by {asked!r} before any rank had started; it waits to be released")
        _say(verdict.reason)
        return _follow(run, here, verdict)
    attempt = write_attempt(run, cluster, machine, files, is_new=is_of_people)  # it has come since we asked
    address, port = here.address(), free_from(rendezvous_port(here.job_id, attempt))
    events = EventWriter(run, f"launcher-attempt-{attempt}")
    events.write(
        "job", attempt=attempt, job_id=here.job_id, restart=here.restart, nodes=list(here.nodes), address=address
    )
    events.close()
    print(attempt, address, port)
    return 0


def _settle_lost(run: RunDirectory, attempt: int, here: Allocation) -> int:
    """See to what follows an attempt that could not tell how it ended. EXIT_AGAIN: another one, here."""
    place = read_place(run, attempt)
    nodes = place.nodes if place else ()
    silent = _silent_node(nodes, node_endings(run, attempt))
    ended = attempt_ended(run, attempt, nodes=nodes, job_id=str(here.job_id), lost_node=silent)
    verdict = settle(run, ended, JobDescription.load(run).retries)
    _say(f"attempt {attempt}: {verdict.reason}")
    if verdict.decision in ("requeue", "again") or (verdict.exclude and not set(verdict.exclude) & set(here.nodes)):
        return EXIT_AGAIN
    if verdict.decision == "finished":
        _set_state(run, "finished")
    elif verdict.decision == "failed":
        _set_state(run, "failed", verdict.reason)
    return _follow(run, here, verdict)


def end(run: RunDirectory, attempt: int, code: int) -> int:
    """Say how an attempt ended and what follows, and see to it. Returns by what the batch script goes on or leaves."""
    description, here = JobDescription.load(run), _allocation()
    job = own_job(here.job_id)
    endings = _endings(run, attempt, here, killed=job is not None and not job.has_nodes)
    # Where every node tells how its ranks left, srun knows nothing better: killed with its job, it has its own code.
    departure = departure_of(endings, code if len(endings) < len(here.nodes) else 0)
    result = result_of(launch_of(run, attempt, description.ranks), departure)
    ended = attempt_ended(
        run,
        attempt,
        result.document(),
        nodes=here.nodes,
        job_id=str(here.job_id),
        lost_node=_silent_node(here.nodes, endings),
    )
    if ended.stop_reason == "SIGTERM" and _is_preempted(run, here, job):
        ended = replace(ended, stop_reason=_PREEMPTED)
    verdict = settle(
        run,
        ended,
        description.retries,
        cancelled=job is not None and job.is_cancelled,
        nodes_stay=job is None or job.has_nodes,
    )
    _say(_ending_text(result, ended, verdict))
    if verdict.exit_code != EXIT_AGAIN:
        print(job_report(run), flush=True)
    return _follow(run, here, verdict)


def refuse(run: RunDirectory, code: int) -> int:
    """The preflight found something wrong: go on without the nodes that it names, or not at all."""
    verdict = refused_nodes(run, code)
    _say(verdict.reason)
    events = EventWriter(run, "preflight")
    events.write("refusal", decision=verdict.decision, reason=verdict.reason, exclude=list(verdict.exclude))
    events.close()
    followed = _follow(run, _allocation(), verdict)
    if followed != EXIT_STOPPED:
        _set_state(run, "failed", verdict.reason)
    # None can be had without the nodes that the preflight blames: then it is of no use to try.
    return EXIT_DO_NOT_RESTART if followed == EXIT_AGAIN else followed


def stop(run: RunDirectory, signal: str) -> int:
    if requested_stop(run) is None:  # what a person has asked for stands: to be held, or to end at once
        request_stop(run, signal)
    _say(f"stop requested by {signal}: the run saves and leaves")
    return 0


def _follow(run: RunDirectory, here: Allocation, verdict: Verdict) -> int:
    if verdict.exit_code != EXIT_AGAIN and goes_back(here.job_id, here.restart):
        return _follow_requeued(run, here, verdict)
    if verdict.decision in ("requeue", "hold", "exclude"):
        # Before: a job that is requeued ends this very process.
        on_hold = _queued(run, verdict)
        if verdict.exclude or not requeue(here.job_id, on_hold=on_hold):
            try:
                chained = chain(run, here.job_id, verdict.exclude, on_hold=on_hold)
            except SlurmError as error:
                if not verdict.exclude:
                    raise
                left_out = ", ".join(verdict.exclude)
                _say(f"no job can be had without {left_out} ({error.message}): once more on these nodes")
                return EXIT_AGAIN
            _say(f"goes on in job {chained}")
        return EXIT_STOPPED
    if verdict.decision == "give-up":
        _set_state(run, "failed", verdict.reason)
    return verdict.exit_code


def _queued(run: RunDirectory, verdict: Verdict) -> bool:
    """The run waits in the queue from now on. Returns whether it does so on hold."""
    _set_state(run, "queued")
    on_hold = verdict.decision == "hold"
    if on_hold:
        run.stop_file.unlink(missing_ok=True)  # it is answered: whoever releases the job wants it to go on
    return on_hold


def _follow_requeued(run: RunDirectory, here: Allocation, verdict: Verdict) -> int:
    """Slurm was faster, and has put the job back into the queue by itself. Another one would be one too many."""
    if verdict.decision not in ("requeue", "hold", "exclude"):
        if verdict.decision == "give-up":
            _set_state(run, "failed", verdict.reason)
        take_back(here.job_id)
        return verdict.exit_code
    _say("Slurm has put the job back into the queue")
    on_hold = _queued(run, verdict)
    try:
        change_requeued(run, here.job_id, verdict.exclude, on_hold=on_hold)
    except SlurmError as error:  # of the nodes that are left none may do: it goes on as it is
        _say(f"the job stays as it was: {error.message}")
    return EXIT_STOPPED


def _allocation() -> Allocation:
    here = allocation()
    assert here is not None, "a batch script runs in a job"
    return here


def _endings(run: RunDirectory, attempt: int, here: Allocation, *, killed: bool) -> list[NodeEnding]:
    """What the nodes say of their ranks. When a job is killed, srun leaves early, its tasks when they have saved."""
    until = time.monotonic() + (_TASKS_SECONDS if killed else 0)
    while True:
        endings, outcome = node_endings(run, attempt), read_outcome(run, attempt)
        failed = outcome is not None and outcome.get("error")
        if failed or len(endings) == len(here.nodes) or time.monotonic() >= until:
            return endings
        time.sleep(0.2)


def _silent_node(nodes: Sequence[str], endings: Sequence[NodeEnding]) -> str | None:
    """The one node that has left no word, while others have."""
    told = {ending.number for ending in endings}
    silent = [name for number, name in enumerate(nodes) if number not in told]
    return silent[0] if told and len(silent) == 1 else None


def _set_state(run: RunDirectory, state: str, error: str | None = None) -> None:
    before = read_status(run) or Status("queued")
    problem = write_status(
        run,
        replace(
            before,
            state=state,  # type: ignore[arg-type]
            last_error=error or before.last_error,
            host=socket.gethostname(),
            pid=None,
            updated_at=datetime.now(timezone.utc),
        ),
    )
    if problem:
        _say(problem)


def _is_preempted(run: RunDirectory, here: Allocation, job: JobState | None) -> bool:
    """Slurm says so of a job in its grace time; of one that is back in the queue already, only in its output."""
    if job is not None and job.is_preempted:
        return True
    outputs = [path for path in job_outputs(run) if path.stem == str(here.job_id)]
    return any("DUE TO PREEMPTION" in line for path in outputs for line in last_lines(path))


def _ending_text(result: Result, ended: Ended, verdict: Verdict) -> str:
    reason = ended.stop_reason or result.reason
    error = f": {result.error['message']}" if result.error else f" ({reason})" if reason else ""
    how_far = f" at step {result.step}" if ended.counts_steps else ""
    follows = "" if verdict.decision == "finished" else f"\ngradus: {verdict.decision}: {verdict.reason}"
    return f"{result.state}{how_far}{error}{follows}"


def _say(text: str) -> None:
    print(f"gradus: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    verb, path, *rest = arguments
    run = RunDirectory(Path(path))
    try:
        if verb == "begin":
            return begin(run)
        if verb == "stop":
            return stop(run, *rest)
        if verb == "end":
            return end(run, *map(int, rest))
        assert verb == "refuse", verb
        return refuse(run, *map(int, rest))
    except GradusError as error:
        _say(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
        _set_state(run, "failed", error.message)
        return error.exit_code
    except OSError as error:  # the shared folder is not there, or full
        _say(f"error: {error}")
        return EXIT_FAILED


if __name__ == "__main__":
    os.umask(0o077)  # what it writes is for the user's eyes, as the rest of a run
    sys.exit(main(sys.argv[1:]))
