"""Injections: what a fire drill does to a run, and by what it is told that the run has got over it."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradus.checkpoint.manifest import committed_steps
from gradus.launcher.drill_request import DrillRequest, Harm, ask_for, done_path
from gradus.launcher.processes import attempt_processes
from gradus.launcher.slurm.commands import run_slurm
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics
from gradus.record.process import process_of
from gradus.record.status import Status, read_status
from gradus.schema.errors import GradusError, InputError

KINDS = (
    *("kill-rank", "kill-node", "hang", "slow-rank", "preempt", "timeout", "disk-full", "corrupt-checkpoint", "nan"),
)
_PATIENCE_SECONDS = 60.0
_SLOW_SECONDS = 60.0
_DISK_FULL_SECONDS = 20.0
_SMALL_FILE_BYTES = 4096  # what a writer may write while its disk is full: less than any checkpoint needs


@dataclass(frozen=True)
class Injected:
    """What was done, and when."""

    kind: str
    what: str
    at: float  # seconds since 1970
    step: int  # that the run had reached
    attempt: int


@dataclass(frozen=True)
class Target:
    """A live run, and the job that it is in, if it is in one."""

    run: RunDirectory
    job_id: str | None = None
    rank: int | None = None  # to which it is done; None: the last one

    @property
    def status(self) -> Status:
        status = read_status(self.run)
        if status is None or status.state != "running":
            state = status.state if status else "unknown"
            raise InputError(
                f"{self.run.path}: the run is {state}", hint="a drill needs one that is running", found=state
            )
        return status

    @property
    def last_rank(self) -> int:
        starts = [event for event in read_events(self.run) if event["event"] == "start" and "ranks" in event]
        return int(starts[-1]["ranks"]) - 1 if starts else 0


def inject(kind: str, target: Target) -> Injected:
    """Do it. Returns when it has happened."""
    status = target.status
    what = _INJECTIONS[kind](target, status)
    return Injected(kind, what, time.time(), reached(target.run), status.attempt)


def reached(run: RunDirectory) -> int:
    return max((int(row["step"]) for row in read_metrics(run) if row.get("loss") is not None), default=0)


def _by_launcher(harm: Harm) -> Callable[[Target, Status], str]:
    """What the launcher of the rank's node does, wherever that is."""

    def do(target: Target, status: Status) -> str:
        rank = target.last_rank if target.rank is None else target.rank
        request = DrillRequest(harm, rank, status.attempt, secrets.token_hex(4), _SLOW_SECONDS)
        ask_for(target.run, request)
        _wait(lambda: done_path(target.run, request).exists(), f"rank {rank} is not there, or nobody watches it")
        words = {
            "kill-rank": "killed",
            "kill-node": "killed with all that ran on its node",
            "hang": "stopped for good",
        }
        return f"rank {rank} was {words.get(harm, f'slowed to a third for {_SLOW_SECONDS:.0f} s')}"

    return do


def _preempt(target: Target, status: Status) -> str:
    """As Slurm does: SIGTERM to all processes of the job's steps."""
    if target.job_id is not None:
        run_slurm(["scancel", "--signal=TERM", target.job_id])
        return f"all steps of job {target.job_id} got SIGTERM, as in a preemption"
    return _signal_launcher(target, status, signal.SIGTERM)


def _timeout(target: Target, status: Status) -> str:
    """As Slurm does before a time limit: SIGUSR1 to the batch shell."""
    if target.job_id is not None:
        run_slurm(["scancel", "--signal=USR1", "--batch", target.job_id])
        return f"the batch shell of job {target.job_id} got SIGUSR1, as before its time limit"
    return _signal_launcher(target, status, signal.SIGUSR1)


def _signal_launcher(target: Target, status: Status, number: signal.Signals) -> str:
    launchers = _parents(attempt_processes(target.run.path, status.attempt))
    if not launchers:
        raise GradusError(f"{target.run.path}: its launcher is not on this machine")
    os.kill(launchers[0], number)
    return f"the launcher got {number.name}"


def _disk_full(target: Target, status: Status) -> str:
    """No file of the run's processes may grow any more, for a while: the kernel refuses it as a full disk does."""
    processes = attempt_processes(target.run.path, status.attempt)
    if not processes:
        raise GradusError(f"{target.run.path}: its processes are not on this machine, whose files could be limited")
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in processes}
    usual = before[processes[0]]
    try:
        _limit_files({pid: (_SMALL_FILE_BYTES, hard) for pid, (_, hard) in before.items()})
        time.sleep(_DISK_FULL_SECONDS)
    finally:  # also of those that were started meanwhile, and however this ends: a drill must not leave a run crippled
        now = attempt_processes(target.run.path, status.attempt)
        _limit_files({pid: before.get(pid, usual) for pid in now})
    return f"for {_DISK_FULL_SECONDS:.0f} s no file could grow beyond {_SMALL_FILE_BYTES} bytes"


def _limit_files(limits: Mapping[int, tuple[int, int]]) -> None:
    for pid, limit in limits.items():
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def _corrupt_checkpoint(target: Target, status: Status) -> str:
    """A byte of the newest checkpoint, and then a rank, so that it is needed."""
    steps = committed_steps(target.run.checkpoints)
    if len(steps) < 2:
        raise InputError(
            f"{target.run.path}: has {len(steps)} checkpoints; a drill that damages the newest needs one before it",
            hint="wait for the next one",
            found=len(steps),
            allowed="at least 2",
        )
    step = max(steps)
    part = sorted((target.run.checkpoints / steps[step]).glob("*.safetensors"))[0]
    with part.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    killed = _by_launcher("kill-rank")(target, status)
    return f"a bit of {part.name} of the checkpoint of step {step} was flipped, and {killed}"


def _nan(target: Target, status: Status) -> str:
    raise InputError(
        f"{target.run.path}: a NaN cannot be put into a run that is alive",
        hint="gradus drill RECIPE --inject nan starts a test run with one",
        field="--inject",
        found="nan",
    )


_INJECTIONS: dict[str, Callable[[Target, Status], str]] = {
    "kill-rank": _by_launcher("kill-rank"),
    "kill-node": _by_launcher("kill-node"),
    "hang": _by_launcher("hang"),
    "slow-rank": _by_launcher("slow-rank"),
    "preempt": _preempt,
    "timeout": _timeout,
    "disk-full": _disk_full,
    "corrupt-checkpoint": _corrupt_checkpoint,
    "nan": _nan,
}


def _parents(processes: Sequence[int]) -> list[int]:
    """Who started these and is not one of them: the launcher."""
    found = [process.parent for pid in processes if (process := process_of(pid)) is not None]
    return [parent for parent in dict.fromkeys(found) if parent not in processes and parent > 1]


def _wait(what: Callable[[], Any], otherwise: str) -> None:
    give_up_at = time.monotonic() + _PATIENCE_SECONDS
    while not what():
        if time.monotonic() > give_up_at:
            raise GradusError(otherwise, hint="gradus watch RUN shows its ranks and nodes")
        time.sleep(0.1)
