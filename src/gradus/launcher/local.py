"""Local: ranks on this machine, started, watched and brought to an orderly end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from gradus.hardware.cluster import detect_cluster
from gradus.hardware.detect import detect_machine
from gradus.hardware.torch_build import check_torch_can_use, installed_torch
from gradus.launcher.attempt import check_resumable, prepare_attempt
from gradus.launcher.torchrun import death_in_log, free_port, rank_environment, torchrun_command
from gradus.planner.defaults import default_plan, default_world_size
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.display import Display
from gradus.record.events import EventWriter
from gradus.record.metrics import read_metrics
from gradus.record.outcome import read_outcome
from gradus.record.status import read_status, write_status
from gradus.record.stop import request_stop
from gradus.record.tensorboard import TensorBoardExporter
from gradus.schema.cluster import Cluster
from gradus.schema.errors import EXIT_FAILED
from gradus.schema.recipe import Recipe

POLL_SECONDS = 0.1
_KILL_AFTER_SECONDS = 10.0


@dataclass(frozen=True)
class Launch:
    """An attempt that is ready to start."""

    run: RunDirectory
    attempt: int
    recipe: Recipe
    ranks: int
    cores: int


@dataclass(frozen=True)
class Result:
    """How a run ended. `exit_code` is what `gradus train` leaves with."""

    run: RunDirectory
    state: str
    exit_code: int
    step: int
    loss: float | None
    reason: str | None = None
    error: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row for each logged step."""
        return read_metrics(self.run)

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "run": str(self.run.path),
            "state": self.state,
            "exit_code": self.exit_code,
            "step": self.step,
            "loss": self.loss,
            "reason": self.reason,
        }
        if self.error:
            document["error"] = self.error
        if self.problems:
            document["problems"] = self.problems
        return document


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
    """Train a recipe on this machine: start the ranks, wait, and return how it ended."""
    if not isinstance(recipe, Recipe):
        recipe = Recipe.load(recipe)
    launch = prepare(recipe, nproc, cluster=cluster, runs=Path(runs), run_id=run_id, resume=resume)
    return launch_local(launch, quiet=quiet)


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
    machine = detect_machine()
    build = installed_torch()
    if build is not None:
        check_torch_can_use(machine, build)
    cluster = cluster or detect_cluster(machine)
    ranks = nproc or default_world_size(recipe, cluster)
    choice = default_plan(recipe, cluster, ranks)
    if resume is not None:
        run = RunDirectory.open(resume, runs)
        check_resumable(run, recipe)
    else:
        run = RunDirectory.create(runs, recipe.name, run_id)
    attempt = prepare_attempt(run, recipe, cluster, choice, machine)
    return Launch(run, attempt, recipe, ranks, machine.cpu_cores)


def launch_local(launch: Launch, *, quiet: bool = False, stream: TextIO | None = None) -> Result:
    """Start torchrun, show progress, turn signals into stop requests, and report how it ended."""
    run, attempt = launch.run, launch.attempt
    node = socket.gethostname()
    command = torchrun_command(launch.ranks, free_port(), "gradus.training.rank", [str(run.path), str(attempt)])
    log_path = run.log_path(attempt, node)
    events = EventWriter(run, f"launcher-attempt-{attempt}")
    events.write("launch", attempt=attempt, ranks=launch.ranks, node=node)
    display = None if quiet else Display(run, launch.recipe.steps, stream)
    exporter = TensorBoardExporter(run) if "tensorboard" in launch.recipe.exporters else None

    def say(text: str) -> None:
        if display:
            display.say(text)

    say(f"{launch.recipe.name}: {launch.ranks} rank{'s' if launch.ranks > 1 else ''}, run {run.path}")
    try:
        with log_path.open("ab") as log, signals_as_requests(run, say) as signals:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=rank_environment(launch.ranks, launch.cores, launch.recipe.deterministic),
                start_new_session=True,  # the terminal's Ctrl-C is for this process alone
                preexec_fn=_die_with_parent,
            )
            while process.poll() is None:
                if signals.at_once:
                    _end_now(process)
                for follower in (display, exporter):
                    if follower:
                        follower.poll()
                time.sleep(POLL_SECONDS)
    finally:
        if display:
            display.close()
        if exporter:
            exporter.close()
    result = result_of(launch, process.returncode, ended_at_once=signals.at_once)
    events.write("end", attempt=attempt, state=result.state, exit_code=result.exit_code, error=result.error)
    events.close()
    return result


def result_of(launch: Launch, return_code: int, ended_at_once: bool = False) -> Result:
    """How an attempt ended: what its ranks left behind, or what torchrun says of ranks that could not."""
    run, attempt = launch.run, launch.attempt
    log_path = run.log_path(attempt, socket.gethostname())
    outcome = read_outcome(run, attempt)
    if outcome is None or (outcome.get("error") or {}).get("kind") == "lost-peer":
        died = death_in_log(log_path.read_text(errors="replace"))
        if ended_at_once:
            died = {"kind": "interrupted", "message": "ended at once by a second interrupt", "hint": None}
        if died is not None or outcome is None:
            fallback = {
                "kind": "launch-failed",
                "message": f"the ranks left with exit code {return_code} and no outcome",
                "hint": f"see {log_path}",
            }
            outcome = {"state": "failed", "exit_code": EXIT_FAILED, "error": died or fallback}
    status = read_status(run)
    if status is not None and status.state == "running":  # rank 0 could not say goodbye
        message = (outcome.get("error") or {}).get("message")
        write_status(run, replace(status, state=outcome["state"], last_error=message))
    rows = read_metrics(run)
    step = outcome.get("step", status.step if status else 0)
    loss = outcome.get("loss", next((row["loss"] for row in reversed(rows) if row.get("loss") is not None), None))
    error = outcome.get("error")
    if error:
        error = {**error, "log": str(log_path)}
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


@dataclass
class _Signals:
    """What was asked of this process by signals so far."""

    requested: bool = False
    at_once: bool = False
    raises: bool = False  # whether a second Ctrl-C is a KeyboardInterrupt here, rather than a note for the launcher


@contextlib.contextmanager
def signals_as_requests(run: RunDirectory, say: Callable[[str], None]) -> Iterator[_Signals]:
    """Ctrl-C, SIGTERM and SIGUSR1 ask the run to save and stop; a second Ctrl-C ends it at once."""
    signals = _Signals()

    def handle(number: int, frame: FrameType | None) -> None:
        if not signals.requested:
            signals.requested = True
            request_stop(run, signal.Signals(number).name)
            say("stopping: the run saves at the next step boundary (Ctrl-C again ends it at once)")
        elif number == signal.SIGINT:
            signals.at_once = True
            if signals.raises:
                raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield signals
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_now(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks on SIGTERM; what is left after a while is killed with the whole session."""
    process.terminate()
    try:
        process.wait(_KILL_AFTER_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _die_with_parent() -> None:
    """In the child: if the launcher is killed, torchrun gets SIGTERM and takes its ranks along."""
    parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)
