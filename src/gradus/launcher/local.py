"""Local: ranks on this machine, started, watched and brought to an orderly end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from gradus.faults.parent import end_with_parent
from gradus.hardware.cluster import detect_cluster
from gradus.hardware.detect import detect_machine
from gradus.hardware.torch_build import check_torch_can_use, installed_torch
from gradus.launcher.attempt import Launch, check_resumable, prepare_attempt
from gradus.launcher.following import POLL_SECONDS, Following, following
from gradus.launcher.result import Result
from gradus.launcher.torchrun import (
    death_in_log,
    free_port,
    kill_left_over,
    port_taken_in_log,
    rank_environment,
    torchrun_command,
)
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter
from gradus.record.lock import locked
from gradus.record.metrics import read_metrics
from gradus.record.outcome import read_outcome
from gradus.record.status import Status, read_status, write_status
from gradus.record.tensorboard import check_tensorboard_installed
from gradus.schema.cluster import Cluster
from gradus.schema.errors import EXIT_FAILED
from gradus.schema.recipe import Recipe

_RANK_MODULE = "gradus.training.rank"
_KILL_AFTER_SECONDS = 10.0


def train(
    recipe: Recipe | str | Path,
    nproc: int | None = None,
    *,
    cluster: Cluster | None = None,
    runs: str | Path = "runs",
    run_id: str | None = None,
    resume: str | None = None,
    quiet: bool = False,
) -> Result:
    """Train a recipe on this machine: start the ranks, wait, and return how it ended.

    A bad recipe raises; a run that fails does not: its result has the state `failed` and the error.
    """
    if not isinstance(recipe, Recipe):
        recipe = Recipe.load(recipe)
    launch = prepare(recipe, nproc, cluster=cluster, runs=Path(runs), run_id=run_id, resume=resume)
    result = launch_local(launch, quiet=quiet)
    if result.error and not quiet:
        print(f"error: {result.error['message']}", file=sys.stderr)
    return result


def prepare(
    recipe: Recipe,
    nproc: int | None = None,
    *,
    cluster: Cluster | None = None,
    runs: Path = Path("runs"),
    run_id: str | None = None,
    resume: str | None = None,
) -> Launch:
    """Check everything that can be checked without torch, and only then write the attempt's files."""
    recipe = resolved(recipe)
    if "tensorboard" in recipe.exporters:
        check_tensorboard_installed()
    machine = detect_machine()
    build = installed_torch()
    if build is not None:
        check_torch_can_use(machine, build)
    cluster = cluster or detect_cluster(machine)
    choice = default_plan(recipe, cluster, nproc)
    if resume is not None:
        run = RunDirectory.open(resume, runs)
        lock = locked(run)
        check_resumable(run, recipe)
    else:
        run = RunDirectory.create(runs, recipe.name, run_id)
        lock = locked(run)
    attempt = prepare_attempt(run, recipe, cluster, choice, machine)
    return Launch(run, attempt, recipe, choice.plan.mesh.world_size, machine.cpu_cores, lock)


def launch_local(launch: Launch, *, quiet: bool = False, stream: TextIO | None = None) -> Result:
    """Start torchrun, follow its ranks to their end, and report how it went."""
    try:
        with following(launch, quiet=quiet, stream=stream) as followed:
            return_code = _run_torchrun(launch, followed)
            if return_code > 0 and not followed.signals.at_once and _lost_its_port(launch):
                followed.say("another process took the port of the ranks: starting them once more with another one")
                return_code = _run_torchrun(launch, followed)
    except BaseException as error:
        note_failure(launch, error)
        raise
    return result_of(launch, return_code, ended_at_once=followed.signals.at_once)


def _run_torchrun(launch: Launch, followed: Following) -> int:
    """Start the ranks and follow them until torchrun leaves; its return code."""
    arguments = [str(launch.run.path), str(launch.attempt)]
    with _log(launch).open("ab") as log:
        process = subprocess.Popen(
            torchrun_command(launch.ranks, free_port(), _RANK_MODULE, arguments),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=rank_environment(launch.ranks, launch.cores, launch.recipe.deterministic),
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # on which it takes its ranks along
        )
        try:
            while process.poll() is None:
                followed.poll()
                if followed.signals.at_once:
                    _end_now(process)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                _end_now(process)  # ranks that nobody waits for must not go on
            kill_left_over(_RANK_MODULE, arguments)
    return process.returncode


def _lost_its_port(launch: Launch) -> bool:
    """Whether torchrun found its port taken between `free_port` and its own start, and so started no rank at all."""
    return read_outcome(launch.run, launch.attempt) is None and port_taken_in_log(_log_text(launch))


def note_failure(launch: Launch, error: BaseException) -> None:
    """An attempt that ends in an exception of the launching process is over, for everybody who looks at its files."""
    _settle_status(launch.run, "failed", str(error) or type(error).__name__)
    _write_end(launch, "failed", EXIT_FAILED, {"message": f"{type(error).__name__}: {error}"})


def result_of(launch: Launch, return_code: int, ended_at_once: bool = False) -> Result:
    """How an attempt ended: what its ranks left behind, or what torchrun says of ranks that could not."""
    run, attempt = launch.run, launch.attempt
    log_path = _log(launch)
    outcome = read_outcome(run, attempt)
    # Rank 0 can write that all is well, and another rank fail after that.
    failed_late = bool(outcome and not outcome.get("error") and return_code and not ended_at_once)
    if outcome is None or failed_late or (outcome.get("error") or {}).get("kind") == "lost-peer":
        died = death_in_log(_log_text(launch))
        if ended_at_once:
            died = {"kind": "interrupted", "message": "ended at once by a second interrupt", "hint": None}
        if died is not None or outcome is None or failed_late:
            after = f"after rank 0 had {outcome['state']}" if outcome and failed_late else "and no outcome"
            fallback = {
                "kind": "launch-failed",
                "message": f"the ranks left with exit code {return_code} {after}",
                "hint": f"see {log_path}",
            }
            outcome = {**(outcome or {}), "state": "failed", "exit_code": EXIT_FAILED, "error": died or fallback}
    error = outcome.get("error")
    status = _settle_status(run, outcome["state"], error["message"] if error else None)
    rows = read_metrics(run)
    step = outcome.get("step", status.step if status else 0)
    loss = outcome.get("loss", next((row["loss"] for row in reversed(rows) if row.get("loss") is not None), None))
    if error and log_path.exists():
        error = {**error, "log": str(log_path)}
    _write_end(launch, outcome["state"], outcome["exit_code"], error)
    return Result(
        run,
        outcome["state"],
        outcome["exit_code"],
        step,
        loss,
        outcome.get("reason"),
        error,
        outcome.get("problems", []),
    )


def _settle_status(run: RunDirectory, state: Any, message: str | None) -> Status | None:
    """The final status. Rank 0 may not have lived to write it, or may know only that it lost a peer."""
    status = read_status(run)
    if status is not None and (status.state == "running" or message is not None):
        status = replace(status, state=state, last_error=message, updated_at=datetime.now(timezone.utc))
        write_status(run, status)
    return status


def _write_end(launch: Launch, state: str, exit_code: int, error: dict[str, Any] | None) -> None:
    events = EventWriter(launch.run, f"launcher-attempt-{launch.attempt}")
    events.write("end", attempt=launch.attempt, state=state, exit_code=exit_code, error=error)
    events.close()


def _log(launch: Launch) -> Path:
    return launch.run.log_path(launch.attempt, socket.gethostname())


def _log_text(launch: Launch) -> str:
    return _log(launch).read_text(errors="replace")


def _end_now(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks on SIGTERM; if it cannot, it is killed, and its ranks end with it."""
    process.terminate()
    try:
        process.wait(_KILL_AFTER_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
