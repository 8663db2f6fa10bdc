"""`gradus train`: a recipe on this machine."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from gradus.cli.output import print_error, print_json, shown
from gradus.launcher.attempt import Launch, recipe_of
from gradus.launcher.following import POLL_SECONDS, Following, following
from gradus.launcher.local import launch_local, note_failure, prepare, result_of
from gradus.launcher.result import Result
from gradus.launcher.torchrun import determinism_variables
from gradus.record.directory import RunDirectory
from gradus.record.summary import summary_text
from gradus.schema.cluster import Cluster
from gradus.schema.errors import GradusError, InputError
from gradus.schema.recipe import Recipe


def train_command(
    recipe_path: str | None,
    nproc: int | None,
    cluster_name: str | None,
    overrides: list[str],
    resume: str | None,
    run_id: str | None,
    runs: str,
    debug: bool,
    as_json: bool,
) -> int:
    recipe = _recipe(recipe_path, overrides, resume, Path(runs))
    if debug and nproc not in (None, 1):
        raise InputError(
            f"--nproc: found {nproc}, but --debug runs one rank in this process",
            field="--nproc",
            found=nproc,
            allowed=1,
        )
    cluster = Cluster.load(cluster_name) if cluster_name else None
    launch = prepare(recipe, 1 if debug else nproc, cluster=cluster, runs=Path(runs), run_id=run_id, resume=resume)
    result = _debug(launch, as_json) if debug else launch_local(launch)
    if as_json:
        print_json(result.document())
    else:
        _report(result, recipe, recipe_path)
    return result.exit_code


def _recipe(path: str | None, overrides: list[str], resume: str | None, runs: Path) -> Recipe:
    if path is not None:
        return Recipe.load(path, overrides)
    if resume is None:
        raise InputError(
            "RECIPE: missing",
            hint="gradus train recipes/quickstart.yaml, or gradus train --resume RUN",
            field="RECIPE",
            found="nothing",
            allowed="a recipe.yaml",
        )
    return Recipe.load(recipe_of(RunDirectory.open(resume, runs)), overrides)


def _debug(launch: Launch, as_json: bool) -> Result:
    """Train in this process; exceptions are not caught, so that a debugger sees them where they happen."""
    for name, value in determinism_variables(launch.recipe.deterministic).items():
        os.environ.setdefault(name, value)
    from gradus.training.rank import debug_rank  # after that: it imports torch

    # With --json, stdout is for the one document: what the user's own code prints goes elsewhere.
    stdout = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    try:
        with following(launch, plain=True) as followed, _polled(followed), stdout:
            followed.signals.raises = True
            debug_rank(launch.run, launch.attempt)
    except BaseException as error:
        note_failure(launch, error)
        if as_json and isinstance(error, Exception) and not isinstance(error, GradusError):
            raise GradusError(f"{type(error).__name__}: {error}", traceback=traceback.format_exc()) from error
        raise
    return result_of(launch, 0)


@contextlib.contextmanager
def _polled(followed: Following) -> Iterator[None]:
    """Follow from a thread, where this one is busy with the training itself."""
    done = threading.Event()

    def poll() -> None:
        while not done.wait(POLL_SECONDS):
            followed.poll()

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _report(result: Result, recipe: Recipe, recipe_path: str | None) -> None:
    for problem in result.problems:
        print(f"warning: {problem}", file=sys.stderr)
    if result.error:  # last, where the eye is
        print_error(result.error)
        if result.step:
            print(f"run: {shown(result.run.path)}, which got to step {result.step}", file=sys.stderr)
        return
    print(summary_text(result.run, _next_steps(result, recipe, recipe_path)))
    if result.state == "finished" and result.reason and not result.reason.endswith("steps done"):
        print(f"\nfinished early: {result.reason}")
    if result.state == "stopped":
        print(f"\nstopped on request ({result.reason}) and saved at step {result.step}; continue with")
        print(f"  gradus train --resume {shown(result.run.path)}")


def _next_steps(result: Result, recipe: Recipe, recipe_path: str | None) -> list[str]:
    if result.state != "finished":
        return []
    tries = [(f"gradus runs {shown(result.run.path)}", "what happened in this run")]
    if recipe_path:
        half = f"optimizer.lr={recipe.optimizer.lr / 2:g}"
        tries.append((f"gradus train {recipe_path} --set {half}", "the same with half the learning rate"))
    tries.append(("gradus models", "reference models to put into a recipe"))
    width = max(len(command) for command, _ in tries)
    return [f"{command:<{width}}   {why}" for command, why in tries]
