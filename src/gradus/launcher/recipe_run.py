"""A recipe's run: everything that can be checked without torch, and only then the files of the attempt."""

from __future__ import annotations

import sys
from pathlib import Path

from gradus.data.position import check_same_data, requested_of
from gradus.hardware.cluster import detect_cluster
from gradus.launcher.attempt import (
    Launch,
    Prepared,
    claim_run,
    is_of_a_script,
    last_attempt,
    usable_machine,
    write_attempt,
)
from gradus.launcher.dry_run import folders_for_dry_run
from gradus.launcher.script import COMMAND_FILE, Script
from gradus.launcher.slurm.step import cluster_of, other_nodes, ranks_of
from gradus.planner.defaults import Choice, default_plan
from gradus.planner.resolve import prepare_data, resolved
from gradus.planner.weights import check_weights
from gradus.record.directory import CHANGED_DATA_MARK, RunDirectory
from gradus.record.exporters import check_exporters
from gradus.schema.cluster import Cluster
from gradus.schema.differences import began_and_found, differences
from gradus.schema.errors import InputError
from gradus.schema.prediction import PREDICTION_FILE
from gradus.schema.profile_request import PROFILE_FILE, ProfileRequest
from gradus.schema.recipe import Recipe

# What makes a run the same run, besides its data. Everything else, the number of ranks included, may change when it
# goes on.
_IDENTITY = {"name", "model", "lora"}


def prepare(
    recipe: Recipe,
    nproc: int | None = None,
    *,
    cluster: Cluster | None = None,
    runs: Path = Path("runs"),
    run_id: str | None = None,
    resume: str | None = None,
    dry_run: bool = False,
    accept_changed_data: bool = False,
    profile: ProfileRequest | None = None,
) -> Launch:
    """An attempt at a recipe. A dry run has its directory in a folder of its own, since it is to leave none behind."""
    recipe = checked(recipe, goes_on=resume is not None)
    machine, nodes = usable_machine(), other_nodes()
    if nodes is not None:
        cluster = cluster or cluster_of(nodes, machine)
        nproc = ranks_of(nodes, nproc, cluster)
    cluster = cluster or detect_cluster(machine)
    prepared = prepared_recipe(recipe, chosen(recipe, cluster, nproc), accept_changed_data, profile)
    prepare_data(recipe)
    made = folders_for_dry_run(runs) if dry_run else ()
    runs = made[0] if made else runs
    run, lock = claim_run(runs, recipe.name, run_id, resume, prepared.check_same_run)
    attempt = write_attempt(run, cluster, machine, prepared.files)
    return Launch(run, attempt, recipe, prepared.ranks, machine.cpu_cores, lock, made)


def checked(recipe: Recipe, *, goes_on: bool) -> Recipe:
    """The recipe as resolved, if what it names is there."""
    recipe = resolved(recipe)
    if not goes_on:  # one that goes on has its weights in its checkpoints
        check_weights(recipe)
    check_exporters(recipe.exporters)
    return recipe


def prepared_recipe(
    recipe: Recipe, choice: Choice, accept_changed_data: bool = False, profile: ProfileRequest | None = None
) -> Prepared:
    """A checked recipe with its plan, and the files of an attempt at it."""
    files = {"recipe.yaml": recipe.to_yaml(), "plan.yaml": choice.plan.to_yaml(choice.reasons)}
    if choice.prediction is not None:
        files[PREDICTION_FILE] = choice.prediction.to_json()
    files |= {CHANGED_DATA_MARK: ""} if accept_changed_data else {}
    if profile is not None:
        profile.check_ranks(choice.plan.mesh.world_size)
        if recipe.steps is not None:
            profile.check_steps(recipe.steps)
        files[PROFILE_FILE] = profile.to_json()

    def check(run: RunDirectory) -> None:
        _check_same_run(run, recipe, accept_changed_data)

    return Prepared(recipe, choice.plan.mesh.world_size, files, check)


def chosen(recipe: Recipe, cluster: Cluster, nproc: int | None) -> Choice:
    """The planner's best plan. Without GPUs the plain defaults, for which not even the planner is loaded."""
    if not cluster.gpus_per_node:
        return default_plan(recipe, cluster, nproc)
    from gradus.planner.planning import plan_to_train

    choice, notes = plan_to_train(recipe, cluster, nproc)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return choice


def recipe_of(run: RunDirectory) -> Path:
    """The recipe of the last attempt, as it was resolved then."""
    if is_of_a_script(run):
        command = Script.load(last_attempt(run) / COMMAND_FILE).text
        raise InputError(
            f"{run.path}: the run is of a script, and not of a recipe: {command}",
            hint=f"gradus train --resume {run.name}/{run.id} [-- {command}]",
            found=str(run.path),
        )
    return last_attempt(run) / "recipe.yaml"


def _check_same_run(run: RunDirectory, now: Recipe, accept_changed_data: bool) -> None:
    """Refuse a recipe that would make it another run.

    Of the data, what is asked for is compared here; whether it is what it was, ranks see when they have opened it.
    """
    before = Recipe.load(recipe_of(run))
    with now.blamed():
        other = differences(before.model_dump(include=_IDENTITY), now.model_dump(include=_IDENTITY))
        if other:
            raise InputError(
                "; ".join(began_and_found(change.key, change.before, change.now) for change in other),
                hint="start a new run for that",
                field=other[0].key,
                found=other[0].now,
                allowed=other[0].before,
            )
        check_same_data(requested_of(before), requested_of(now), accept=accept_changed_data)
