"""What was typed to be trained: a recipe, an earlier run to go on with, or a script after `--`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gradus.launcher.attempt import is_of_a_script
from gradus.launcher.recipe_run import recipe_of
from gradus.launcher.script import Script, script_from
from gradus.launcher.script_run import recorded_script
from gradus.record.directory import RunDirectory
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe


def resumes_a_script(recipe: str | None, resume: str | None, runs: Path) -> bool:
    if recipe is not None or resume is None:
        return False
    run = RunDirectory.open(resume, runs)
    return bool(run.attempts or run.job.is_dir()) and is_of_a_script(run)


def given_recipe(verb: str, recipe: str | None, overrides: Sequence[str], resume: str | None, runs: Path) -> Recipe:
    """The recipe at a path, or that of a run."""
    if recipe is not None:
        if recipe.endswith(".py"):
            raise InputError(
                f"RECIPE: found {recipe}, which is a script",
                hint=f"scripts come after two dashes: gradus {verb} -- {recipe}",
                field="RECIPE",
                found=recipe,
                allowed="a recipe.yaml",
            )
        return Recipe.load(recipe, list(overrides))
    if resume is None:
        raise InputError(
            "RECIPE: missing",
            hint=f"gradus {verb} recipes/quickstart.yaml, gradus {verb} --resume RUN, or gradus {verb} -- script.py",
            field="RECIPE",
            found="nothing",
            allowed="a recipe.yaml",
        )
    return Recipe.load(recipe_of(RunDirectory.open(resume, runs)), list(overrides))


def given_script(command: list[str] | None, resume: str | None, runs: Path) -> Script:
    """The script that was typed, or that of a run."""
    if command is not None:
        return script_from(command)
    assert resume is not None
    return recorded_script(RunDirectory.open(resume, runs))


def refuse_with_a_script(given: Mapping[str, tuple[object, str]]) -> None:
    """What is said about a recipe says nothing about a script: for each option its value, and what to do instead."""
    for name, (value, hint) in given.items():
        if value:
            found = " ".join(value) if isinstance(value, tuple) else value
            raise InputError(
                f"{name}: found {'it' if value is True else found} together with a script, which is no recipe",
                hint=hint,
                field=name,
                found=found,
            )


def check_accepts_changed_data(accept: bool, resume: str | None) -> None:
    if accept and resume is None:
        raise InputError(
            "--accept-changed-data: found it without --resume, but a new run has no data from before",
            field="--accept-changed-data",
            found="nothing to go on with",
            allowed="together with --resume RUN",
        )
