"""An attempt: what is to be started, and the files that describe it, written before any rank starts."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from gradus.checkpoint.manifest import committed_steps
from gradus.hardware.detect import Machine, detect_machine
from gradus.hardware.torch_build import check_torch_can_use, installed_torch
from gradus.launcher.script import COMMAND_FILE, Script
from gradus.record.directory import RunDirectory
from gradus.record.environment import environment
from gradus.record.lock import locked
from gradus.record.status import Status, read_status, shown_state, write_status, writer_is_gone
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe

STARTS_OVER = "no checkpoint: starts again from step 0"


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
        return self.run.log_path(self.attempt, socket.gethostname())

    @property
    def has_own_loop(self) -> bool:
        """Whether a script reads stop requests and writes status and outcome itself; known once it has begun to."""
        return self.run.own_loop_mark(self.attempt).exists()


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
        run = RunDirectory.create(runs, name, run_id)
        return run, locked(run)
    run = RunDirectory.open(resume, runs)
    check_has_attempts(run)
    lock = locked(run)
    check_not_alive(run)
    check(run)
    return run, lock


def write_attempt(run: RunDirectory, cluster: Cluster, machine: Machine, files: Mapping[str, str]) -> int:
    """A new attempt: the files that are particular to it, its cluster and its environment. The run is now running."""
    attempt = run.new_attempt()
    folder = run.attempt_path(attempt)
    (folder / "cluster.yaml").write_text(cluster.to_yaml())
    found = environment(gpus=[asdict(gpu) for gpu in machine.gpus])
    (folder / "environment.json").write_text(json.dumps(found, indent=1))
    for name, text in files.items():
        (folder / name).write_text(text)
    run.stop_file.unlink(missing_ok=True)  # a request that stopped the last attempt has been answered
    before = read_status(run)
    step = before.step if before and not starts_over(run, attempt) else 0
    write_status(run, Status("running", step, attempt=attempt, host=socket.gethostname(), pid=os.getpid()))
    return attempt


def starts_over(run: RunDirectory, attempt: int) -> bool:
    """Whether an attempt goes on with a run that was never saved. Where a script without our loop saves is its own."""
    earlier = [number for number in run.attempts if number < attempt]
    is_ours = any((run.attempt_path(number) / "recipe.yaml").exists() for number in earlier)
    return is_ours and not committed_steps(run.checkpoints)


def last_attempt(run: RunDirectory) -> Path:
    check_has_attempts(run)
    return run.attempt_path(run.attempts[-1])


def is_of_a_script(run: RunDirectory) -> bool:
    return (last_attempt(run) / COMMAND_FILE).exists()


def check_has_attempts(run: RunDirectory) -> None:
    if not run.attempts:
        raise InputError(f"{run.path}: the run has no attempt to go on from", found=str(run.path))


def check_not_alive(run: RunDirectory) -> None:
    status = read_status(run)
    if status is not None and shown_state(status) == "running" and not writer_is_gone(status):
        raise InputError(
            f"{run.path}: the run is alive (updated {status.updated_at:%H:%M:%S} UTC, attempt {status.attempt})",
            hint="wait for it or stop it; if it ran on another machine that is gone, it counts as lost after a minute",
            found=str(run.path),
        )
