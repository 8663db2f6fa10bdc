"""Rank: what each process that torchrun starts does, and how it tells the launcher how it ended."""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gradus.faults.parent import end_with_parent
from gradus.hardware.detect import detect_machine
from gradus.hardware.torch_build import TorchBuild, check_torch_can_use
from gradus.parallel.world import World, alone, connected, store_from_environment
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.record.outcome import read_outcome, write_outcome
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, GradusError, InputError
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe
from gradus.training.live_run import LiveRun
from gradus.training.loop import Ending, train

# A rank that lost its peers waits so long for the one that failed first to say why.
_WAIT_FOR_CAUSE_SECONDS = 5.0


def run_rank(run: RunDirectory, attempt: int, world: World) -> Ending:
    """Train this rank's part of an attempt, as its files describe it."""
    folder = run.attempt_path(attempt)
    recipe, plan = Recipe.load(folder / "recipe.yaml"), Plan.load(folder / "plan.yaml")
    live = LiveRun(recipe, plan, run, attempt, world)
    try:
        ending = train(live)
    except BaseException as error:
        live.recorder.close(state="failed", last_error=str(error) or type(error).__name__)
        raise
    problems = [*live.recorder.problems, *live.recorder.close(state=ending.state, step=live.state.step)]
    if world.leads:
        _write_ending(run, attempt, ending, live.state.step, problems)
    return ending


def debug_rank(run: RunDirectory, attempt: int) -> Ending:
    """One rank in this very process, so that a debugger works and exceptions arrive whole."""
    return run_rank(run, attempt, alone(_device(0)))


def main(arguments: list[str] | None = None) -> NoReturn:
    """The entry point of a rank under torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("attempt", type=int)
    parsed = parser.parse_args(arguments)
    run, attempt = RunDirectory(parsed.run), parsed.attempt
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    faulthandler.enable()
    end_with_parent(signal.SIGKILL)  # torchrun gives each rank a session of its own: killing it would leave them behind
    try:
        device = _device(local_rank)
        with connected(rank, local_rank, int(os.environ["WORLD_SIZE"]), device, store_from_environment()) as world:
            try:
                run_rank(run, attempt, world)
            except Exception as error:
                # Inside, so that the group is not closed first: peers may be stuck in a collective with this rank, and
                # closing would wait for them, or they would tell of a lost peer before this rank has told why.
                _fail(run, attempt, error, rank)
    except Exception as error:
        _fail(run, attempt, error, rank)
    _leave(EXIT_FINISHED)


def _fail(run: RunDirectory, attempt: int, error: Exception, rank: int) -> NoReturn:
    traceback.print_exception(error)
    _leave_error(run, attempt, error, rank)
    _leave(EXIT_FAILED)


def _leave(code: int) -> NoReturn:
    """End this process without tearing torch down, whose threads now and then abort at exit.

    Everything of ours is written by now. What the user's code or loader workers registered for the end is done first.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _device(local_rank: int) -> torch.device:
    """The GPU of this rank; the CPU only where there is none, never because torch cannot use one."""
    machine = detect_machine()
    architectures = tuple(torch.cuda.get_arch_list()) or None
    build = TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip, architectures)
    check_torch_can_use(machine, build)
    if not machine.gpus:
        return torch.device("cpu")
    if local_rank >= len(machine.gpus):
        raise InputError(f"--nproc: rank {local_rank} has no GPU; this node has {len(machine.gpus)}", field="--nproc")
    device = torch.device("cuda", local_rank)
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        raise InputError(
            f"{machine.gpus[local_rank].name} is there, but torch {torch.__version__} cannot use it: {error}",
            hint="see what nvidia-smi says; the driver may be older than torch needs",
        ) from error
    return device


def _write_ending(run: RunDirectory, attempt: int, ending: Ending, step: int, problems: list[str]) -> None:
    losses = [row["loss"] for row in read_metrics(run) if row.get("loss") is not None]
    write_outcome(
        run,
        attempt,
        {
            "state": ending.state,
            "exit_code": EXIT_FINISHED if ending.state == "finished" else EXIT_STOPPED,
            "reason": ending.reason,
            "step": step,
            "loss": losses[-1] if losses else None,
            "problems": problems,
        },
    )


def _leave_error(run: RunDirectory, attempt: int, error: Exception, rank: int) -> None:
    """Write why this rank failed, unless another rank's failure came first and explains it."""
    if _lost_a_peer(error):
        deadline = time.monotonic() + _WAIT_FOR_CAUSE_SECONDS
        while time.monotonic() < deadline:
            if read_outcome(run, attempt) is not None:
                return
            time.sleep(0.1)
    document: dict[str, Any] = {"rank": rank, "node": socket.gethostname()}
    if isinstance(error, GradusError):
        document |= error.document()
        exit_code = error.exit_code
    else:
        document |= {
            "kind": "lost-peer" if _lost_a_peer(error) else "exception",
            "message": f"{type(error).__name__}: {error}",
            "hint": None,
            "traceback": "".join(traceback.format_exception(error)),
        }
        exit_code = EXIT_FAILED
    write_outcome(run, attempt, {"state": "failed", "exit_code": exit_code, "error": document})


def _lost_a_peer(error: Exception) -> bool:
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo")
    )


if __name__ == "__main__":
    main()
