"""An attempt: the files that describe it to its ranks, written before any of them starts."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from gradus.hardware.detect import Machine
from gradus.planner.defaults import Choice
from gradus.record.directory import RunDirectory
from gradus.record.environment import environment
from gradus.record.status import Status, read_status, shown_state, write_status, writer_is_gone
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe

# What makes a run the same run. Everything else, the number of ranks included, may change when it goes on.
_IDENTITY = ("name", "model", "data", "batch", "seed")


@dataclass(frozen=True)
class Launch:
    """An attempt that is ready to start."""

    run: RunDirectory
    attempt: int
    recipe: Recipe
    ranks: int
    cores: int
    lock: TextIO | None = None  # held until the launch is forgotten


def prepare_attempt(run: RunDirectory, recipe: Recipe, cluster: Cluster, choice: Choice, machine: Machine) -> int:
    """A new attempt with its recipe, cluster, plan and environment on disk."""
    attempt = run.new_attempt()
    folder = run.attempt_path(attempt)
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    (folder / "cluster.yaml").write_text(cluster.to_yaml())
    (folder / "plan.yaml").write_text(choice.plan.to_yaml(choice.reasons))
    found = environment(gpus=[asdict(gpu) for gpu in machine.gpus])
    (folder / "environment.json").write_text(json.dumps(found, indent=1))
    run.stop_file.unlink(missing_ok=True)  # a request that stopped the last attempt has been answered
    before = read_status(run)
    step = before.step if before else 0
    write_status(run, Status("running", step, attempt=attempt, host=socket.gethostname(), pid=os.getpid()))
    return attempt


def recipe_of(run: RunDirectory) -> Path:
    """The recipe of the last attempt, as it was resolved then."""
    if not run.attempts:
        raise InputError(f"{run.path}: the run has no attempt to go on from", found=str(run.path))
    return run.attempt_path(run.attempts[-1]) / "recipe.yaml"


def check_resumable(run: RunDirectory, recipe: Recipe) -> None:
    """Refuse a run that is alive, and a recipe that would make it another run."""
    status = read_status(run)
    if status is not None and shown_state(status) == "running" and not writer_is_gone(status):
        raise InputError(
            f"{run.path}: the run is alive (updated {status.updated_at:%H:%M:%S} UTC, attempt {status.attempt})",
            hint="wait for it or stop it; if it ran on another machine that is gone, it counts as lost after a minute",
            found=str(run.path),
        )
    with recipe.blamed():
        _check_same_run(Recipe.load(recipe_of(run)), recipe)


def _check_same_run(before: Recipe, now: Recipe) -> None:
    for field in _IDENTITY:
        began, found = getattr(before, field), getattr(now, field)
        if began != found:
            raise InputError(
                f"{field}: the run began with {began!r}, found {found!r}",
                hint="start a new run for that",
                field=field,
                found=str(found),
                allowed=str(began),
            )
