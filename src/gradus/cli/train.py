"""`gradus train`: a recipe or a script on this machine."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

from gradus.cli.given_work import (
    check_accepts_changed_data,
    given_recipe,
    given_script,
    refuse_with_a_script,
    resumes_a_script,
)
from gradus.cli.output import print_json
from gradus.cli.run_report import exit_code, report_recipe, report_script, run_document, told_of_failure
from gradus.launcher.attempt import Launch, deadline_in
from gradus.launcher.device_sampler import DeviceSampler, with_descendants
from gradus.launcher.dry_run import finish_dry_run, remove_dry_run
from gradus.launcher.ending import Departure, note_failure, result_of
from gradus.launcher.following import POLL_SECONDS, following
from gradus.launcher.gathering import Gathering, gathered
from gradus.launcher.launching import launch_here
from gradus.launcher.login_node import FEW_STEPS, check_not_on_a_login_node
from gradus.launcher.node_ranks import variables_of
from gradus.launcher.recipe_run import prepare
from gradus.launcher.result import Result
from gradus.launcher.script_run import prepare_script
from gradus.launcher.surviving import launch_surviving
from gradus.launcher.taking_part import lead, take_part
from gradus.launcher.together import Together, started_together
from gradus.launcher.torchrun import torch_variables
from gradus.record.polling import Polling
from gradus.schema.cluster import Cluster
from gradus.schema.errors import GradusError, InputError
from gradus.schema.profile_request import ProfileRequest
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
    time: str | None = None
    as_json: bool = False
    accept_changed_data: bool = False
    retries: int = 0
    profile: str | None = None
    gathering: Gathering | None = None  # of processes that were started together, which this one leads

    @property
    def submit_line(self) -> list[str]:
        """The same as a job."""
        line = ["gradus", "submit", *([self.recipe] if self.recipe else [])]
        values = {"--nproc": self.nproc, "--cluster": self.cluster, "--resume": self.resume, "--run-id": self.run_id}
        line += [word for option, value in values.items() if value is not None for word in (option, str(value))]
        line += [word for override in self.overrides for word in ("--set", override)]
        line += ["--time", self.time] if self.time is not None else []
        line += ["--retries", str(self.retries)] if self.retries else []
        line += ["--accept-changed-data"] if self.accept_changed_data else []
        line += ["--profile", self.profile] if self.profile is not None else []
        line += ["--runs", self.runs] if self.runs != "runs" else []
        return [*line, *(["--", *self.command] if self.command is not None else [])]


def train_command(options: TrainOptions) -> int:
    together = started_together()
    return _train(options) if together is None else _train_together(options, together)


def _train_together(options: TrainOptions, together: Together) -> int:
    """One of several processes that srun or mpirun has started with this command: process 0 leads."""
    if options.debug:
        raise InputError(
            f"--debug: found it in {together.processes} processes that {together.started_by} has started",
            hint="start one process alone",
            field="--debug",
            found=together.processes,
            allowed=1,
        )
    runs = Path(options.runs)
    if not together.leads:
        return take_part(together, runs, lambda: given_script(options.command, options.resume, runs))
    with gathered(together, runs) as gathering:
        return _train(replace(options, gathering=gathering))


def _shape(options: TrainOptions) -> tuple[int | None, Cluster | None]:
    """How many ranks, and on what, as far as it was said, or follows from what was started."""
    cluster = Cluster.load(options.cluster) if options.cluster else None
    if options.gathering is None:
        return options.nproc, cluster
    return options.gathering.ranks(options.nproc), options.gathering.cluster(cluster)


def _launched(launch: Launch, options: TrainOptions, stdout: TextIO | None = None) -> Result:
    if options.gathering is None and options.retries and not options.dry_run:
        return launch_surviving(launch, options.retries, stdout=stdout)
    if options.gathering is None:
        return launch_here(launch, stdout=stdout)
    return lead(launch, options.gathering, options.gathering.ranks_each(options.nproc), stdout=stdout)


def _train(options: TrainOptions) -> int:
    check_accepts_changed_data(options.accept_changed_data, options.resume)
    if options.command is not None or resumes_a_script(options.recipe, options.resume, Path(options.runs)):
        return _train_script(options)
    return _train_recipe(options)


def _profile(options: TrainOptions) -> ProfileRequest | None:
    request = ProfileRequest.parse(options.profile) if options.profile is not None else None
    if request is not None and options.dry_run:
        raise InputError(
            "--profile: found it together with --dry-run, which makes one step and keeps nothing",
            hint="leave one of them out",
            field="--profile",
            found=options.profile,
        )
    return request


def _train_script(options: TrainOptions) -> int:
    _refuse_recipe_options(options)
    profile = _profile(options)
    script = given_script(options.command, options.resume, Path(options.runs))
    nproc, cluster = _shape(options)
    nproc = nproc or (script.ranks if options.command is None else None)
    if not (options.here or options.gathering):
        check_not_on_a_login_node("a script belongs into a job", options.submit_line)
    deadline = deadline_in(options.time)
    launch = prepare_script(
        script,
        nproc,
        cluster=cluster,
        runs=Path(options.runs),
        run_id=options.run_id,
        resume=options.resume,
        accept_changed_data=options.accept_changed_data,
        profile=profile,
    )
    launch = replace(launch, deadline=deadline)
    result = _launched(launch, options, sys.stderr if options.as_json else sys.stdout)
    if options.as_json:
        print_json(run_document(result))
    else:
        report_script(result)
    return exit_code(result)


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
    refuse_with_a_script(given)


def _train_recipe(options: TrainOptions) -> int:
    runs, profile = Path(options.runs), _profile(options)
    recipe = given_recipe("train", options.recipe, options.overrides, options.resume, runs)
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
    if not (options.here or options.dry_run or options.gathering or _is_short(recipe)):
        budget = f"{recipe.steps} steps" if recipe.steps else "a budget in epochs or tokens"
        check_not_on_a_login_node(f"{budget} are more than a try of {FEW_STEPS}", options.submit_line)
    deadline = deadline_in(options.time)
    nproc, cluster = _shape(options)
    launch = prepare(
        recipe,
        1 if options.debug else nproc,
        cluster=cluster,
        runs=runs,
        run_id=options.run_id,
        resume=options.resume,
        dry_run=options.dry_run,
        accept_changed_data=options.accept_changed_data,
        profile=profile,
    )
    try:
        launch = replace(launch, deadline=deadline)
        result = _debug(launch, options.as_json) if options.debug else _launched(launch, options)
    except BaseException:  # which tells everything: there is no log that it could point to
        if options.dry_run:
            remove_dry_run(launch)
        raise
    if options.dry_run:
        result, summary = finish_dry_run(launch, result)
        _report_dry_run(result, summary, options.as_json)
    elif options.as_json:
        print_json(run_document(result))
    else:
        report_recipe(result, recipe, options.recipe)
    return exit_code(result)


def _is_short(recipe: Recipe) -> bool:
    return recipe.steps is not None and recipe.steps <= FEW_STEPS


def _debug(launch: Launch, as_json: bool) -> Result:
    """Train in this process; exceptions are not caught, so that a debugger sees them where they happen."""
    assert launch.recipe is not None
    for name, value in torch_variables(launch.recipe).items():
        os.environ.setdefault(name, value)
    os.environ.update(variables_of(launch))
    from gradus.training.rank import debug_rank  # after that: it imports torch

    # With --json, stdout is for the one document: what the user's own code prints goes elsewhere.
    stdout = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    try:
        devices = DeviceSampler(launch.run, launch.attempt, 1, partial(with_descendants, os.getpid()))
        with devices, following(launch, plain=True) as followed, Polling(followed.poll, POLL_SECONDS), stdout:
            followed.signals.raises = True
            debug_rank(launch.run, launch.attempt)
    except BaseException as error:
        note_failure(launch, error)
        if as_json and isinstance(error, Exception) and not isinstance(error, GradusError):
            raise GradusError(f"{type(error).__name__}: {error}", traceback=traceback.format_exc()) from error
        raise
    return result_of(launch, Departure(0))


def _report_dry_run(result: Result, summary: list[str], as_json: bool) -> None:
    if as_json:
        document = {**result.document(), "dry_run": True, "summary": summary}
        print_json({**document, "run": None})
    elif not told_of_failure(result, kept=False):
        print("\n".join([*summary, "dry run: everything was built and one step was made; nothing was kept"]))
