"""Joining: how a process with an own loop finds its peers and its run directory, whoever started it.

`gradus train -- script.py` names the run in the environment; under plain torchrun or plain python, rank 0 makes one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from gradus.hardware.cluster import detect_cluster
from gradus.hardware.detect import detect_machine
from gradus.parallel.world import World, alone, connected, store_from_environment
from gradus.planner.defaults import Choice, default_plan
from gradus.record.directory import RunDirectory
from gradus.record.variables import ATTEMPT, RUN
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.device import limit_memory, rank_device


@dataclass(frozen=True)
class Place:
    """Where an own loop runs."""

    world: World
    run: RunDirectory
    attempt: int
    choice: Choice
    launched: bool  # by `gradus train`, which then shows progress and reports the ending
    connection: ExitStack  # closing it leaves the world
    lock: TextIO | None = None


def join(recipe: Recipe, runs: Path, resume: str | None) -> Place:
    connection = ExitStack()
    world = _world(connection, recipe)
    machine = detect_machine()
    cluster = detect_cluster(machine)
    choice = default_plan(recipe, cluster, world.size, own_loop=True)
    files = {"recipe.yaml": recipe.to_yaml(), **plan_file(choice)}
    named = os.environ.get(RUN)
    if named is not None:
        if resume is not None and not _is_run(resume, runs, Path(named)):
            raise InputError(
                f"resume: found {resume!r}, but gradus train has chosen the run already",
                hint=f"gradus train --resume {resume} -- script.py",
                field="resume",
                found=resume,
            )
        run, attempt = RunDirectory(Path(named)), int(os.environ[ATTEMPT])
        if world.leads:
            write_files(run, attempt, files)
            run.own_loop_mark(attempt).touch()  # from now on status and ending come from here
        world.barrier()
        return Place(world, run, attempt, choice, True, connection)

    # Nobody has launched this: it launches itself.
    from gradus.launcher.attempt import STARTS_OVER, claim_run, starts_over, write_attempt
    from gradus.launcher.script import COMMAND_FILE, script_of_this_process

    lock = None
    if world.leads:
        run, lock = claim_run(runs, recipe.name, None, resume, lambda run: None)
        script = script_of_this_process(world.size)
        command = {COMMAND_FILE: script.to_json()} if script is not None else {}
        attempt = write_attempt(run, cluster, machine, {**files, **command})
        if starts_over(run, attempt):
            print(STARTS_OVER, file=sys.stderr)
        _tell(world, f"{attempt} {run.path}")
    else:
        number, _, path = _told(world).partition(" ")
        run, attempt = RunDirectory(Path(path)), int(number)
    return Place(world, run, attempt, choice, False, connection, lock)


def plan_file(choice: Choice) -> dict[str, str]:
    return {"plan.yaml": choice.plan.to_yaml(choice.reasons)}


def write_files(run: RunDirectory, attempt: int, files: Mapping[str, str]) -> None:
    """Into an attempt's folder, in place of what has the same name. Others may read it meanwhile."""
    for name, text in files.items():
        path = run.attempt_path(attempt) / name
        temporary = path.with_name(f".{name}.new")
        temporary.write_text(text)
        temporary.replace(path)


def _is_run(named: str, runs: Path, chosen: Path) -> bool:
    """Whether a script asks for the very run that was chosen for it, as one that gets it by an argument does."""
    try:
        return RunDirectory.open(named, runs).path.resolve() == chosen.resolve()
    except InputError:
        return False


def _world(connection: ExitStack, recipe: Recipe) -> World:
    per_gpu = recipe.plan.ranks_per_gpu  # which a plan has from its recipe alone
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 1
    device = rank_device(local_rank if size > 1 else 0, per_gpu)
    limit_memory(device, recipe.plan.memory_limit_gib)
    if size == 1:
        return alone(device)
    store = store_from_environment()
    return connection.enter_context(connected(rank, local_rank, size, device, store, shares_gpu=per_gpu > 1))


def _tell(world: World, text: str) -> None:
    if world.store is not None:
        world.store.set("own-loop-run", text)


def _told(world: World) -> str:
    assert world.store is not None
    return world.store.get("own-loop-run").decode()
