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
from gradus.parallel.world import World, alone, connected, store_from_environment
from gradus.record.directory import RunDirectory
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe
from gradus.training import dry_run
from gradus.training.boundary import Ending
from gradus.training.device import rank_device
from gradus.training.leaving import leave, tell_ending, tell_failure
from gradus.training.live_run import LiveRun
from gradus.training.loop import train


def run_rank(run: RunDirectory, attempt: int, world: World) -> Ending:
    """Train this rank's part of an attempt, as its files describe it."""
    folder = run.attempt_path(attempt)
    recipe, plan = Recipe.load(folder / "recipe.yaml"), Plan.load(folder / "plan.yaml")
    dry = dry_run.is_dry_run()
    if dry:
        recipe = dry_run.shortened(recipe)
    live = LiveRun.from_recipe(recipe, plan, run, attempt, world)
    with live.recorder.told_of_failure():
        ending = train(live)
    tell_ending(live, ending, dry_run.summary(live) if dry else None)
    return ending


def debug_rank(run: RunDirectory, attempt: int) -> Ending:
    """One rank in this very process, so that a debugger works and exceptions arrive whole."""
    return run_rank(run, attempt, alone(rank_device(0)))


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
        device = rank_device(local_rank)
        with connected(rank, local_rank, int(os.environ["WORLD_SIZE"]), device, store_from_environment()) as world:
            try:
                run_rank(run, attempt, world)
            except Exception as error:
                # Inside, so that the group is not closed first: peers may be stuck in a collective with this rank, and
                # closing would wait for them, or they would tell of a lost peer before this rank has told why.
                _fail(run, attempt, error, rank)
    except Exception as error:
        _fail(run, attempt, error, rank)
    leave(EXIT_FINISHED)


def _fail(run: RunDirectory, attempt: int, error: Exception, rank: int) -> NoReturn:
    traceback.print_exception(error)
    tell_failure(run, attempt, error, rank)
    leave(EXIT_FAILED)


if __name__ == "__main__":
    main()
