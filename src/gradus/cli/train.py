"""`gradus train`: a recipe on this machine."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from gradus.cli.output import print_error, print_json
from gradus.launcher.attempt import recipe_of
from gradus.launcher.local import POLL_SECONDS, Launch, Result, launch_local, prepare, result_of, signals_as_requests
from gradus.record.directory import RunDirectory
from gradus.record.display import Display
from gradus.record.summary import summary_text
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
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
        raise InputError(f"--nproc: found {nproc}, but --debug runs one rank in this process", field="--nproc")
    cluster = Cluster.load(cluster_name) if cluster_name else None
    launch = prepare(recipe, 1 if debug else nproc, cluster=cluster, runs=Path(runs), run_id=run_id, resume=resume)
    result = _debug(launch) if debug else launch_local(launch)
    if as_json:
        print_json(result.document())
    else:
        _report(result, recipe_path)
    return result.exit_code


def _recipe(path: str | None, overrides: list[str], resume: str | None, runs: Path) -> Recipe:
    if path is not None:
        return Recipe.load(path, overrides)
    if resume is None:
        raise InputError("RECIPE: missing", hint="gradus train recipes/quickstart.yaml, or gradus train --resume RUN")
    return Recipe.load(recipe_of(RunDirectory.open(resume, runs)), overrides)


def _debug(launch: Launch) -> Result:
    """Train in this process; exceptions are not caught, so that a debugger sees them where they happen."""
    from gradus.training.rank import debug_rank

    display = Display(launch.run, launch.recipe.steps, plain=True)
    done = threading.Event()

    def show() -> None:
        while not done.wait(POLL_SECONDS):
            display.poll()

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        with signals_as_requests(launch.run, display.say) as signals:
            signals.raises = True
            debug_rank(launch.run, launch.attempt)
    finally:
        done.set()
        shower.join()
        display.close()
    return result_of(launch, 0)


def _report(result: Result, recipe_path: str | None) -> None:
    if result.error:
        print_error(result.error)
    if result.step:
        print(summary_text(result.run, _next_steps(result, recipe_path)))
    for problem in result.problems:
        print(f"warning: {problem}", file=sys.stderr)
    if result.state == "stopped":
        print(
            f"\nstopped on request ({result.reason}) and saved; continue with: gradus train --resume {result.run.path}"
        )


def _next_steps(result: Result, recipe_path: str | None) -> list[str]:
    if result.state != "finished":
        return []
    recipe = recipe_path or "RECIPE"
    return [
        f"gradus runs {result.run.id}                        what happened in this run",
        f"gradus train {recipe} --set optimizer.lr=1e-3    the same with another learning rate",
        "gradus models                                      reference models to put into a recipe",
    ]
