"""`gradus train`: a recipe or a script on this machine."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from gradus.cli.output import print_error, print_json, shown
from gradus.launcher.attempt import Launch, is_of_a_script
from gradus.launcher.dry_run import finish_dry_run, remove_dry_run
from gradus.launcher.ending import Departure, last_validation, note_failure, result_of
from gradus.launcher.following import POLL_SECONDS, following
from gradus.launcher.local import dry_run_variables, launch_local
from gradus.launcher.login_node import FEW_STEPS, check_not_on_a_login_node
from gradus.launcher.recipe_run import prepare, recipe_of
from gradus.launcher.result import Result
from gradus.launcher.script import script_from
from gradus.launcher.script_run import prepare_script, recorded_script
from gradus.launcher.torchrun import torch_variables
from gradus.record.directory import RunDirectory
from gradus.record.format import duration_text
from gradus.record.polling import Polling
from gradus.record.summary import summarize, summary_text
from gradus.schema.cluster import Cluster
from gradus.schema.errors import GradusError, InputError
from gradus.schema.recipe import Recipe


@dataclass(frozen=True)
class TrainOptions:
    """What was typed after `gradus train`."""

    recipe: str | None = None
    command: list[str] | None = None  # what follows `--`
    nproc: int | None = None
    cluster: str | None = None
    overrides: tuple[str, ...] = ()
    resume: str | None = None
    run_id: str | None = None
    runs: str = "runs"
    debug: bool = False
    dry_run: bool = False
    here: bool = False
    as_json: bool = False

    @property
    def submit_line(self) -> list[str]:
        """The same as a job."""
        line = ["gradus", "submit", *([self.recipe] if self.recipe else [])]
        values = {"--nproc": self.nproc, "--cluster": self.cluster, "--resume": self.resume, "--run-id": self.run_id}
        line += [word for option, value in values.items() if value is not None for word in (option, str(value))]
        line += [word for override in self.overrides for word in ("--set", override)]
        line += ["--runs", self.runs] if self.runs != "runs" else []
        return [*line, *(["--", *self.command] if self.command is not None else [])]


def train_command(options: TrainOptions) -> int:
    if options.command is not None or _resumes_a_script(options):
        return _train_script(options)
    return _train_recipe(options)


def _resumes_a_script(options: TrainOptions) -> bool:
    if options.recipe is not None or options.resume is None:
        return False
    run = RunDirectory.open(options.resume, Path(options.runs))
    return bool(run.attempts) and is_of_a_script(run)


def _train_script(options: TrainOptions) -> int:
    _refuse_recipe_options(options)
    if options.command is not None:
        script = script_from(options.command)
        nproc = options.nproc
    else:
        assert options.resume is not None
        script = recorded_script(RunDirectory.open(options.resume, Path(options.runs)))
        nproc = options.nproc or script.ranks
    if not options.here:
        check_not_on_a_login_node("a script belongs into a job", options.submit_line)
    cluster = Cluster.load(options.cluster) if options.cluster else None
    launch = prepare_script(
        script, nproc, cluster=cluster, runs=Path(options.runs), run_id=options.run_id, resume=options.resume
    )
    result = launch_local(launch, stdout=sys.stderr if options.as_json else sys.stdout)
    if options.as_json:
        print_json(_document(result))
    else:
        _report_script(result)
    return _exit_code(result)


def _refuse_recipe_options(options: TrainOptions) -> None:
    """What is said about a recipe says nothing about a script."""
    debug = (
        "one rank alone, with a debugger: MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 "
        "python -m pdb script.py"
    )
    given = {
        "RECIPE": (options.recipe, "a recipe or a script after --, not both"),
        "--set": (options.overrides, "give the script its own arguments, after its name"),
        "--debug": (options.debug, debug),
        "--dry-run": (options.dry_run, "gradus cannot know what a script builds; give it few steps by its own options"),
    }
    for name, (value, hint) in given.items():
        if value:
            found = " ".join(value) if isinstance(value, tuple) else value
            raise InputError(
                f"{name}: found {'it' if value is True else found} together with a script, which is no recipe",
                hint=hint,
                field=name,
                found=found,
            )


def _train_recipe(options: TrainOptions) -> int:
    runs = Path(options.runs)
    recipe = _recipe(options, runs)
    if options.debug and options.nproc not in (None, 1):
        raise InputError(
            f"--nproc: found {options.nproc}, but --debug runs one rank in this process",
            field="--nproc",
            found=options.nproc,
            allowed=1,
        )
    if options.dry_run and options.resume is not None:
        raise InputError(
            "--dry-run: found it together with --resume, but a dry run leaves no run behind to go on with",
            hint="leave one of them out",
            field="--dry-run",
            found=options.resume,
        )
    if not (options.here or options.dry_run or _is_short(recipe)):
        budget = f"{recipe.steps} steps" if recipe.steps else "a budget in epochs or tokens"
        check_not_on_a_login_node(f"{budget} are more than a try of {FEW_STEPS}", options.submit_line)
    cluster = Cluster.load(options.cluster) if options.cluster else None
    launch = prepare(
        recipe,
        1 if options.debug else options.nproc,
        cluster=cluster,
        runs=runs,
        run_id=options.run_id,
        resume=options.resume,
        dry_run=options.dry_run,
    )
    try:
        result = _debug(launch, options.as_json) if options.debug else launch_local(launch)
    except BaseException:  # which tells everything: there is no log that it could point to
        if options.dry_run:
            remove_dry_run(launch)
        raise
    if options.dry_run:
        _report_dry_run(result, finish_dry_run(launch, result), options.as_json)
    elif options.as_json:
        print_json(_document(result))
    else:
        _report(result, recipe, options.recipe)
    return _exit_code(result)


def _recipe(options: TrainOptions, runs: Path) -> Recipe:
    path, overrides = options.recipe, list(options.overrides)
    if path is not None:
        if path.endswith(".py"):
            raise InputError(
                f"RECIPE: found {path}, which is a script",
                hint=f"scripts come after two dashes: gradus train -- {path}",
                field="RECIPE",
                found=path,
                allowed="a recipe.yaml",
            )
        return Recipe.load(path, overrides)
    if options.resume is None:
        raise InputError(
            "RECIPE: missing",
            hint="gradus train recipes/quickstart.yaml, gradus train --resume RUN, or gradus train -- script.py",
            field="RECIPE",
            found="nothing",
            allowed="a recipe.yaml",
        )
    return Recipe.load(recipe_of(RunDirectory.open(options.resume, runs)), overrides)


def _is_short(recipe: Recipe) -> bool:
    return recipe.steps is not None and recipe.steps <= FEW_STEPS


def _debug(launch: Launch, as_json: bool) -> Result:
    """Train in this process; exceptions are not caught, so that a debugger sees them where they happen."""
    assert launch.recipe is not None
    for name, value in torch_variables(launch.recipe).items():
        os.environ.setdefault(name, value)
    os.environ.update(dry_run_variables(launch))
    from gradus.training.rank import debug_rank  # after that: it imports torch

    # With --json, stdout is for the one document: what the user's own code prints goes elsewhere.
    stdout = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    try:
        with following(launch, plain=True) as followed, Polling(followed.poll, POLL_SECONDS), stdout:
            followed.signals.raises = True
            debug_rank(launch.run, launch.attempt)
    except BaseException as error:
        note_failure(launch, error)
        if as_json and isinstance(error, Exception) and not isinstance(error, GradusError):
            raise GradusError(f"{type(error).__name__}: {error}", traceback=traceback.format_exc()) from error
        raise
    return result_of(launch, Departure(0))


def _exit_code(result: Result) -> int:
    assert result.exit_code is not None, "the run has ended"
    return result.exit_code


def _document(result: Result) -> dict[str, object]:
    return {**result.document(), **last_validation(result.run)}


def _report(result: Result, recipe: Recipe, recipe_path: str | None) -> None:
    if not _told_of_failure(result):
        print(summary_text(result.run, _next_steps(result, recipe, recipe_path)))
        if result.state == "finished" and result.reason and not result.reason.endswith("steps done"):
            print(f"\nfinished early: {result.reason}")
        if result.state == "stopped":
            print(f"\nstopped on request ({result.reason}) and saved at step {result.step}; continue with")
            print(f"  gradus train --resume {shown(result.run.path)}")


def _report_script(result: Result) -> None:
    """On stderr: stdout is the script's own."""
    if _told_of_failure(result):
        return
    if result.metrics:  # an own loop
        print(summary_text(result.run), file=sys.stderr)
    else:
        seconds = summarize(result.run).wall_seconds
        spent = f" after {duration_text(seconds)}" if seconds is not None else ""
        print(f"{result.state}{spent}: run {shown(result.run.path)}", file=sys.stderr)
    if result.state == "stopped":
        saved = f"saved at step {result.step}" if result.metrics else "whether it saved is up to the script"
        print(f"stopped on request ({result.reason}); {saved}; continue with", file=sys.stderr)
        print(f"  gradus train --resume {shown(result.run.path)}", file=sys.stderr)


def _report_dry_run(result: Result, summary: list[str], as_json: bool) -> None:
    if as_json:
        document = {**result.document(), "dry_run": True, "summary": summary}
        print_json({**document, "run": None})
    elif not _told_of_failure(result, kept=False):
        print("\n".join([*summary, "dry run: everything was built and one step was made; nothing was kept"]))


def _told_of_failure(result: Result, *, kept: bool = True) -> bool:
    for problem in result.problems:
        print(f"warning: {problem}", file=sys.stderr)
    if result.error is None:
        return False
    print_error(result.error)  # last, where the eye is
    if result.step and kept:
        print(f"run: {shown(result.run.path)}, which got to step {result.step}", file=sys.stderr)
    return True


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
