"""An attempt: what is to be started, and the files that describe it, written before any rank starts."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from gradus.checkpoint.manifest import committed_steps
from gradus.hardware.detect import Machine, detect_machine
from gradus.hardware.torch_build import check_torch_can_use, installed_torch
from gradus.launcher.script import COMMAND_FILE, Script
from gradus.launcher.slurm.standing import check_not_in_queue
from gradus.record.directory import RunDirectory
from gradus.record.environment import environment
from gradus.record.lock import locked, release
from gradus.record.node import node_name
from gradus.record.status import Status, read_status, shown_state, write_status, writer_is_gone
from gradus.record.stop import forget_stop
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.intervals import seconds_of
from gradus.schema.recipe import Recipe

STARTS_OVER = "no checkpoint: starts again from step 0"


@dataclass(frozen=True)
class Prepared:
    """Work that was checked as far as can be without starting it, and the files that describe an attempt at it."""

    work: Recipe | Script
    ranks: int
    files: dict[str, str]
    check_same_run: Callable[[RunDirectory], None]  # refuses an earlier run that this cannot go on with

    @property
    def name(self) -> str:
        """Of its runs."""
        return self.work.name


@dataclass(frozen=True)
class Launch:
    """An attempt that is ready to start. What its ranks do is said by a recipe, or is a user's own script."""

    run: RunDirectory
    attempt: int
    work: Recipe | Script
    ranks: int
    cores: int
    lock: TextIO | None = None  # held until the launch is forgotten
    made_for_dry_run: tuple[Path, ...] = ()  # innermost first: what a dry run removes when it went well
    deadline: float | None = None  # seconds since 1970 by which it must be saved and over

    @property
    def dry_run(self) -> bool:
        return bool(self.made_for_dry_run)

    @property
    def recipe(self) -> Recipe | None:
        return self.work if isinstance(self.work, Recipe) else None

    @property
    def script(self) -> Script | None:
        return self.work if isinstance(self.work, Script) else None

    @property
    def log_path(self) -> Path:
        return self.run.log_path(self.attempt, node_name())

    @property
    def has_own_loop(self) -> bool:
        """Whether a script reads stop requests and writes status and outcome itself; known once it has begun to."""
        return self.run.own_loop_mark(self.attempt).exists()


def deadline_in(limit: str | None, field: str = "--time") -> float | None:
    """The moment at which so much time is over, counted from now, in seconds since 1970."""
    if limit is None:
        return None
    try:
        return time.time() + seconds_of(limit)
    except ValueError as error:
        raise InputError(
            f"{field}: found {limit!r}, allowed: {error}", field=field, found=limit, allowed=str(error)
        ) from None


def usable_machine() -> Machine:
    """This machine; an error if it has GPUs that the installed torch cannot use."""
    machine = detect_machine()
    build = installed_torch()
    if build is not None:
        check_torch_can_use(machine, build)
    return machine


def claim_run(
    runs: Path, name: str, run_id: str | None, resume: str | None, check: Callable[[RunDirectory], None]
) -> tuple[RunDirectory, TextIO]:
    """A new run, or an earlier one to go on with if it passes the check; held until the file is closed."""
    if resume is None:
        left = RunDirectory(runs.absolute() / name / run_id) if run_id else None
        run = left if left is not None and left.never_began else RunDirectory.create(runs, name, run_id)
        return run, locked(run)
    run = RunDirectory.open(resume, runs)
    check_has_attempts(run)
    lock = locked(run)
    try:
        check_not_alive(run)
        check(run)
    except BaseException:
        release(lock)  # at once: a notebook keeps the error, and with it everything that was around
        raise
    return run, lock


def write_attempt(
    run: RunDirectory,
    cluster: Cluster,
    machine: Machine,
    files: Mapping[str, str],
    is_new: Callable[[str], bool] = lambda stop_reason: False,
) -> int:
    """A new attempt: the files that are particular to it, its cluster and its environment. The run is now running.

    A request to stop that is there was for the last attempt, unless it `is_new`, by its reason.
    """
    forget_stop(run, unless=is_new)
    found = environment(gpus=[asdict(gpu) for gpu in machine.gpus])
    common = {"cluster.yaml": cluster.to_yaml(), "environment.json": json.dumps(found, indent=1)}
    attempt = run.new_attempt({**common, **files})
    before = read_status(run)
    step = before.step if before and not starts_over(run, attempt) else 0
    # What comes back from the queue has as many steps as before; what a person starts again may have others.
    total = before.steps_total if before and before.state == "queued" else None
    write_status(run, Status("running", step, total, attempt, host=socket.gethostname(), pid=os.getpid()))
    return attempt


def starts_over(run: RunDirectory, attempt: int) -> bool:
    """Whether an attempt goes on with a run that was never saved. Where a script without our loop saves is its own."""
    earlier = [number for number in run.attempts if number < attempt]
    is_ours = any((run.attempt_path(number) / "recipe.yaml").exists() for number in earlier)
    return is_ours and not committed_steps(run.checkpoints)


def last_attempt(run: RunDirectory) -> Path:
    """Where what the run is to do is described: in its newest attempt, or while it waits for its first, in its job."""
    check_has_attempts(run)
    return run.attempt_path(run.attempts[-1]) if run.attempts else run.job


def is_of_a_script(run: RunDirectory) -> bool:
    return (last_attempt(run) / COMMAND_FILE).exists()


def check_has_attempts(run: RunDirectory) -> None:
    if not run.attempts and not run.job.is_dir():
        raise InputError(f"{run.path}: the run has no attempt to go on from", found=str(run.path))


def check_not_alive(run: RunDirectory) -> None:
    status = read_status(run)
    check_not_in_queue(run, status)
    if status is not None and shown_state(status) == "running" and not writer_is_gone(status):
        raise InputError(
            f"{run.path}: the run is alive (updated {status.updated_at:%H:%M:%S} UTC, attempt {status.attempt})",
            hint="wait for it or stop it; if it ran on another machine that is gone, it counts as lost after a minute",
            found=str(run.path),
        )
