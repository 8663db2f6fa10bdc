"""Rank: what each process that torchrun starts for a recipe does."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import traceback
from pathlib import Path
from typing import NoReturn

from gradus.faults.parent import end_with_parent
from gradus.faults.rank_signals import survive_stop_signals
from gradus.hardware.rank_cores import bind_to_share
from gradus.parallel.world import World, alone, connected, store_from_environment
from gradus.record.directory import RunDirectory
from gradus.record.variables import BIND, PARENT_RANKS
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe
from gradus.training import dry_run
from gradus.training.boundary import Ending
from gradus.training.device import limit_memory, rank_device
from gradus.training.leaving import leave, note_steps_made, tell_ending, tell_failure
from gradus.training.live_run import LiveRun
from gradus.training.loop import train
from gradus.training.out_of_memory import out_of_memory_explained


def run_rank(run: RunDirectory, attempt: int, world: World, *, watched: bool = True) -> Ending:
    """Train this rank's part of an attempt, as its files describe it."""
    recipe, plan = Recipe.load(run.attempt_path(attempt) / "recipe.yaml"), _plan_of(run, attempt)
    dry = dry_run.is_dry_run()
    if dry:
        recipe = dry_run.shortened(recipe)
    live = LiveRun.from_recipe(recipe, plan, run, attempt, world, watched=watched)
    with live.recorder.told_of_failure(), out_of_memory_explained(live):
        try:
            ending = train(live)
        except Exception as error:
            note_steps_made(error, live.state.step)
            live.watch.explain(error)
            live.saving.rescue()
            raise
    tell_ending(live, ending, dry_run.summary(live) if dry else None)
    return ending


def debug_rank(run: RunDirectory, attempt: int) -> Ending:
    """One rank in this very process, so that a debugger works and exceptions arrive whole."""
    device = rank_device(0)
    limit_memory(device, _plan_of(run, attempt).memory_limit_gib)
    return run_rank(run, attempt, alone(device), watched=False)  # in a debugger, standing still is the point


def main(arguments: list[str] | None = None) -> NoReturn:
    """What the process of a rank does (see `rank_process`)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("attempt", type=int)
    parsed = parser.parse_args(arguments)
    run, attempt = RunDirectory(parsed.run), parsed.attempt
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    faulthandler.enable()
    if os.environ.get(BIND) == "1":
        bind_to_share(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    survive_stop_signals(int(os.environ.get(PARENT_RANKS, os.environ["LOCAL_WORLD_SIZE"])))
    end_with_parent(signal.SIGKILL)  # torchrun gives each rank a session of its own: killing it would leave them behind
    try:
        plan = _plan_of(run, attempt)  # before ranks connect: it says who shares a GPU, and so how they may talk
        device = rank_device(local_rank, plan.ranks_per_gpu)
        limit_memory(device, plan.memory_limit_gib)
        size, store, shared = int(os.environ["WORLD_SIZE"]), store_from_environment(), plan.ranks_per_gpu > 1
        with connected(rank, local_rank, size, device, store, shares_gpu=shared) as world:
            try:
                run_rank(run, attempt, world)
            except Exception as error:
                # Inside, so that the group is not closed first: peers may be stuck in a collective with this rank, and
                # closing would wait for them, or they would tell of a lost peer before this rank has told why.
                _fail(run, attempt, error, rank)
    except Exception as error:
        _fail(run, attempt, error, rank)
    leave(EXIT_FINISHED)


def _plan_of(run: RunDirectory, attempt: int) -> Plan:
    return Plan.load(run.attempt_path(attempt) / "plan.yaml")


def _fail(run: RunDirectory, attempt: int, error: Exception, rank: int) -> NoReturn:
    traceback.print_exception(error)
    tell_failure(run, attempt, error, rank)
    leave(EXIT_FAILED)
