"""`gradus submit`: a recipe or a script as a job of Slurm."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradus.cli.given_work import (
    check_accepts_changed_data,
    given_recipe,
    given_script,
    refuse_with_a_script,
    resumes_a_script,
)
from gradus.cli.output import print_json, shown
from gradus.cli.run_report import exit_code, report_recipe, report_script, run_document
from gradus.launcher.attempt import last_attempt
from gradus.launcher.slurm.checks import Site
from gradus.launcher.slurm.description import JobDescription
from gradus.launcher.slurm.requests import Wish, recipe_request, script_request, swept
from gradus.launcher.slurm.submission import Job, Request, Submitted, planned_job, submit_job
from gradus.launcher.slurm.waiting import wait_for
from gradus.record.directory import RunDirectory
from gradus.record.format import count_text
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.profile_request import ProfileRequest
from gradus.schema.recipe import Recipe

_INTERRUPTED = 130  # as shells have it, after Ctrl-C


@dataclass(frozen=True)
class SubmitOptions:
    """What was typed after `gradus submit`."""

    recipe: str | None = None
    command: list[str] | None = None  # what follows `--`
    cluster: str | None = None
    nodes: int | None = None
    nproc: int | None = None
    scheduler: Mapping[str, object] = field(default_factory=dict)  # partition, time, ...
    sbatch: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()
    resume: str | None = None
    run_id: str | None = None
    runs: str = "runs"
    preflight: bool = False
    retries: int = 3
    accept_changed_data: bool = False
    profile: str | None = None
    dry_run: bool = False
    wait: bool = False
    as_json: bool = False


def submit_command(options: SubmitOptions) -> int:
    check_accepts_changed_data(options.accept_changed_data, options.resume)
    _check_sweep(options)
    runs = Path(options.runs)
    recipe: Recipe | None = None
    if options.command is not None or resumes_a_script(options.recipe, options.resume, runs):
        request, site = _script_request(options, runs)
    else:
        recipes = swept(lambda overrides: _recipe(options, overrides), options.sweep)
        recipe = recipes[0]
        request, site = recipe_request(recipes, _cluster(options), _wish(options))
    if options.dry_run:
        _report_dry_run(planned_job(request, site), options.as_json)
        return 0
    submitted = submit_job(request, site)
    if not options.as_json:
        _report(submitted)
    if options.wait:
        return _wait(submitted, recipe, options)
    if options.as_json:
        print_json(submitted.document())
    return 0


def _recipe(options: SubmitOptions, overrides: list[str]) -> Recipe:
    everything = [*options.overrides, *overrides]
    return given_recipe("submit", options.recipe, everything, options.resume, Path(options.runs))


def _script_request(options: SubmitOptions, runs: Path) -> tuple[Request, Site]:
    refuse_with_a_script(
        {
            "RECIPE": (options.recipe, "a recipe or a script after --, not both"),
            "--set": (options.overrides, "give the script its own arguments, after its name"),
            "--sweep": (options.sweep, "gradus cannot know what a script's arguments mean: submit it several times"),
        }
    )
    return script_request(given_script(options.command, options.resume, runs), _cluster(options), _wish(options))


def _cluster(options: SubmitOptions) -> Cluster:
    """The one that is named; without, that of the run to go on with; else the Slurm that answers here."""
    if options.cluster is not None:
        return Cluster.load(options.cluster)
    if options.resume is not None:
        run = RunDirectory.open(options.resume, Path(options.runs))
        before = Cluster.load(last_attempt(run) / "cluster.yaml")
        if before.scheduler.kind == "slurm":
            return before
    return Cluster.detect()


def _wish(options: SubmitOptions) -> Wish:
    nodes, nproc = options.nodes, options.nproc
    if nodes is None and options.resume is not None and options.cluster is None:
        nodes = _cluster(options).nodes  # as before, and so are the ranks unless another mesh is asked for
        if not any(override.startswith("plan.mesh") for override in options.overrides):
            nproc = nproc or _ranks_before(options)
    return Wish(
        nodes=nodes,
        nproc=nproc,
        fields=options.scheduler,
        sbatch=options.sbatch,
        after=options.after,
        runs=Path(options.runs),
        run_id=options.run_id,
        resume=options.resume,
        preflight=options.preflight,
        retries=options.retries,
        accept_changed_data=options.accept_changed_data,
        profile=ProfileRequest.parse(options.profile) if options.profile is not None else None,
        dry_run=options.dry_run,
    )


def _ranks_before(options: SubmitOptions) -> int | None:
    """On each node, of the job that the run had."""
    assert options.resume is not None
    try:
        return JobDescription.load(RunDirectory.open(options.resume, Path(options.runs))).ranks_per_node
    except (OSError, ValueError, KeyError, TypeError):  # it was no job
        return None


def _check_sweep(options: SubmitOptions) -> None:
    if not options.sweep:
        return
    for name, value in {"--resume": options.resume, "--wait": options.wait}.items():
        if value:
            raise InputError(
                f"--sweep: found it together with {name}, which is for one run",
                hint="leave one of them out; gradus runs shows all runs of a sweep",
                field="--sweep",
                found=name,
            )


def _report_dry_run(job: Job, as_json: bool) -> None:
    if as_json:
        start = job.start.at.isoformat(timespec="seconds") if job.start and not job.waits_for else None
        print_json(
            {
                "dry_run": True,
                "script": job.script,
                "runs": [str(run.path) for run in job.runs],
                "nodes": job.description.nodes,
                "ranks": job.description.ranks,
                "starts_at": start,
                "notes": list(job.notes),
            }
        )
        return
    sys.stdout.write(job.script)  # and not a byte more
    _say_notes(job)


def _report(submitted: Submitted) -> None:
    job, description = submitted.job, submitted.job.description
    ranks = count_text(description.ranks, "rank")
    shape = f"{ranks} on {count_text(description.nodes, 'node')}"
    _say_notes(job)
    print(f"job {submitted.job_id}: {shape}", file=sys.stderr)
    for run in job.runs:
        print(f"run {shown(run.path)}", file=sys.stderr)
    name = f"{submitted.run.name}/{submitted.run.id}"
    print(f"follow it with: gradus watch {name}   or: gradus runs why {name}", file=sys.stderr)


def _say_notes(job: Job) -> None:
    for note in job.notes:
        print(f"note: {note}", file=sys.stderr)
    if job.waits_for:
        many = len(job.waits_for) > 1
        after = f"job{'s' if many else ''} {', '.join(job.waits_for)} {'have' if many else 'has'} ended"
        print(f"note: it starts when {after}, at the earliest", file=sys.stderr)
    elif job.start is not None:
        print(f"note: Slurm would start it at {job.start.at:%Y-%m-%d %H:%M:%S} on {job.start.nodes}", file=sys.stderr)


def _wait(submitted: Submitted, recipe: Recipe | None, options: SubmitOptions) -> int:
    try:
        result = wait_for(submitted.run, steps=recipe.steps if recipe else None)
    except KeyboardInterrupt:
        name = f"{submitted.run.name}/{submitted.run.id}"
        print(f"\nthe job goes on without this command; to end it: gradus runs cancel {name}", file=sys.stderr)
        return _INTERRUPTED
    if options.as_json:
        print_json({**run_document(result), "job_id": submitted.job_id})
    elif recipe is not None:
        report_recipe(result, recipe, None, again="runs release")
    else:
        report_script(result, again="runs release")
    return exit_code(result)
