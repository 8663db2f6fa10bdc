"""Submission: from a recipe or a script to a job in the queue, with everything checked before anything is written."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradus.launcher.attempt import Prepared
from gradus.launcher.containers import Contained, contained
from gradus.launcher.job_software import JobSoftware, job_software, place_for_software
from gradus.launcher.result import Result
from gradus.launcher.script import Script
from gradus.launcher.slurm.checks import (
    Site,
    Start,
    check_is_seen,
    check_limits,
    check_scheduler,
    chosen_partitions,
    earliest_start,
    fitted,
    read_site,
)
from gradus.launcher.slurm.commands import SlurmError, answered, job_state, passes
from gradus.launcher.slurm.description import DESCRIPTION_FILE, SCRIPT_FILE, JobDescription
from gradus.launcher.slurm.options import (
    Shape,
    file_name,
    header_word,
    lead_seconds,
    sbatch_options,
    settled,
    shape_of,
    srun_options,
    submission_variables,
)
from gradus.launcher.slurm.own_job import note_job
from gradus.launcher.slurm.queue import queue, submissions
from gradus.launcher.slurm.queued_files import written
from gradus.launcher.slurm.script import ScriptInputs, network_variables, node_tasks, render
from gradus.launcher.slurm.waiting import wait_for
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter
from gradus.record.format import count_text
from gradus.record.status import read_status
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.scheduler import Scheduler

# Enough to save a large model to a slow disk, and for the 60 s by which Slurm may be early; scheduler.lead has another.
_LEAD_SECONDS = 120
_CANCEL_SECONDS = 60.0
_JOB = re.compile(r"\d+(_\d+)?")


@dataclass(frozen=True)
class Request:
    """What is to be submitted, checked: one run, or the runs of a sweep, which differ in nothing but their recipes."""

    cluster: Cluster  # of which the job has `nodes` nodes
    works: tuple[Prepared, ...]
    ranks_per_node: int
    ranks_per_gpu: int = 1
    runs: Path = Path("runs")
    run_id: str | None = None
    resume: str | None = None
    after: tuple[str, ...] = ()
    preflight: bool = False
    retries: int = 3
    folders: tuple[Path, ...] = ()  # what ranks read besides the run: data, and the user's own code
    directory: Path = field(default_factory=Path.cwd)

    @property
    def nodes(self) -> int:
        return self.cluster.nodes


@dataclass(frozen=True)
class Job:
    """A job that could be submitted: its script, and the runs that it would be for."""

    script: str
    runs: tuple[RunDirectory, ...]
    description: JobDescription
    cluster: Cluster
    start: Start | None
    notes: tuple[str, ...]
    waits_for: tuple[str, ...] = ()  # the jobs after which it may start, by their numbers


@dataclass(frozen=True, repr=False)
class Submitted:
    """A job in the queue."""

    job_id: str
    job: Job

    @property
    def run(self) -> RunDirectory:
        return self.job.runs[0]

    @property
    def runs(self) -> tuple[RunDirectory, ...]:
        return self.job.runs

    @property
    def result(self) -> Result:
        """How the run is now."""
        return Result.load(self.run.path)

    def wait(self, *, quiet: bool = False) -> Result:
        """Until the job has left the queue for good, requeues included."""
        return wait_for(self.run, quiet=quiet)

    def __repr__(self) -> str:
        shape = f"{count_text(self.job.description.ranks, 'rank')} on {count_text(self.job.description.nodes, 'node')}"
        return f"<job {self.job_id}: {shape}; {', '.join(str(run.path) for run in self.runs)}>"

    def document(self) -> dict[str, Any]:
        """As `--json` prints it."""
        start = self.job.start if not self.job.waits_for else None  # Slurm's guess knows of no dependency
        document = {
            "run": str(self.run.path),
            "state": "queued",
            "exit_code": None,
            "job_id": self.job_id,
            "nodes": self.job.description.nodes,
            "ranks": self.job.description.ranks,
            "starts_at": start.at.isoformat(timespec="seconds") if start else None,
            "notes": list(self.job.notes),
        }
        return {**document, **({"runs": [str(run.path) for run in self.runs]} if len(self.runs) > 1 else {})}


def planned_job(request: Request, site: Site | None = None) -> Job:
    """Everything that a submission would be, checked by us and by `sbatch --test-only`; nothing is written."""
    check_scheduler(request.cluster)
    site = site or read_site()
    scheduler = _with_after(settled(request.cluster.scheduler), request)
    notes = check_limits(site, scheduler, request.nodes)
    wanted = shape_of(request.cluster, request.nodes, request.ranks_per_node, request.ranks_per_gpu)
    shape, found = fitted(site, scheduler, wanted)
    notes += found
    if scheduler.requeue is None and not site.requeues:
        scheduler = scheduler.model_copy(update={"requeue": False})
    _check_array(site, len(request.works))
    cluster = request.cluster.model_copy(update={"scheduler": scheduler})
    runs = _future_runs(request)
    notes += check_is_seen(runs[0].path, cluster, site, scheduler)
    software, inside = _software(request, cluster, runs, dry_run=True)
    notes += [*software.warnings, *(inside.notes if inside else ())]
    lead = lead_seconds(scheduler, _LEAD_SECONDS, _limit(site, scheduler))
    header = _header(scheduler, shape, runs, lead)
    description = JobDescription(request.nodes, request.ranks_per_node, request.retries, lead, tuple(header))
    script = render(_inputs(request, cluster, shape, runs, header, software, inside, lead))
    start = earliest_start(script, submission_variables(header))
    waits_for = tuple(re.findall(r"(?<=:)\d[\d_]*", scheduler.dependency or ""))
    return Job(script, runs, description, cluster, start, tuple(dict.fromkeys(notes)), waits_for)


def submit_job(request: Request, site: Site | None = None) -> Submitted:
    """Write the run directories and put the job into the queue. If Slurm refuses it, nothing is left behind."""
    job = planned_job(request, site)
    with ExitStack() as stack:
        for run, work in zip(job.runs, request.works, strict=True):
            stack.enter_context(written(run, work, _files_of(job), request.resume))
        _software(request, job.cluster, job.runs, dry_run=False)
        job_id = _sbatch(job, request.works)
        try:
            _note(job, job_id)
        except BaseException:  # a full disk: a job that no run knows of would only fail
            answered(["scancel", job_id], retry_seconds=_CANCEL_SECONDS)
            raise
    return Submitted(job_id, job)


def _note(job: Job, job_id: str) -> None:
    """The job's number, in each of its runs."""
    for number, run in enumerate(job.runs):
        own_id = f"{job_id}_{number}" if len(job.runs) > 1 else job_id
        note_job(run, own_id)
        events = EventWriter(run, "submit")
        events.write("submit", job_id=own_id, nodes=job.description.nodes, ranks=job.description.ranks)
        events.close()


def _future_runs(request: Request) -> tuple[RunDirectory, ...]:
    """Where the runs will be. Those of a sweep have one id with their numbers, by which Slurm tells them apart."""
    if request.resume is not None:
        return (RunDirectory.open(request.resume, request.runs),)
    first = RunDirectory.future(request.runs, request.works[0].name, request.run_id)
    if len(request.works) == 1:
        return (first,)
    return tuple(
        RunDirectory.future(request.runs, work.name, f"{first.id}-{number}")
        for number, work in enumerate(request.works)
    )


def _header(scheduler: Scheduler, shape: Shape, runs: Sequence[RunDirectory], lead: int) -> list[str]:
    array = len(runs) if len(runs) > 1 else None
    # The runs of an array have their output in their own folders: the script sees to that.
    output = "/dev/null" if array else file_name(str(runs[0].job)) + "/%j.out"
    return sbatch_options(scheduler, shape, name=runs[0].name, output=output, lead_seconds=lead, array=array)


def _inputs(
    request: Request,
    cluster: Cluster,
    shape: Shape,
    runs: Sequence[RunDirectory],
    header: Sequence[str],
    software: JobSoftware,
    inside: Contained | None,
    lead: int,
) -> ScriptInputs:
    scheduler = cluster.scheduler
    of_srun = srun_options(scheduler)
    container = inside.srun_options if inside else ()
    title = f"{runs[0].name}: {count_text(shape.nodes, 'node')} of {_ranks_text(shape)}"
    return ScriptInputs(
        title=title,
        runs=tuple(str(run.path) for run in runs),
        header=tuple(header_word(option) for option in header),
        python=software.python,
        srun_options=(*node_tasks(shape.nodes), *of_srun, *container),
        environment=(*software.lines, *(inside.lines if inside else ())),
        variables=network_variables(cluster.network),
        prefix=inside.prefix if inside else (),
        ranks_by_mpi=tuple(_mpi_command(scheduler, shape, (*of_srun, *container))),
        lead_seconds=lead,
        preflight=request.preflight,
    )


def _ranks_text(shape: Shape) -> str:
    return count_text(shape.ranks_per_node, "rank")


def _mpi_command(scheduler: Scheduler, shape: Shape, of_srun: Sequence[str]) -> list[str]:
    if scheduler.launcher != "mpi":
        return []
    if scheduler.mpi == "mpirun":
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [
            "mpirun",
            *root,
            "-np",
            str(shape.ranks),
            "--map-by",
            f"ppr:{shape.ranks_per_node}:node",
            "--bind-to",
            "none",
        ]
    tasks = [f"--nodes={shape.nodes}", f"--ntasks={shape.ranks}", f"--ntasks-per-node={shape.ranks_per_node}"]
    return ["srun", f"--mpi={scheduler.mpi or 'pmix'}", *tasks, "--kill-on-bad-exit=0", "--wait=0", *of_srun]


def _software(
    request: Request, cluster: Cluster, runs: Sequence[RunDirectory], *, dry_run: bool
) -> tuple[JobSoftware, Contained | None]:
    """The job's software, and the container around it. A dry run checks what can be, and makes nothing."""
    root = request.runs.absolute()
    folders = [*(run.path for run in runs), *request.folders]
    place = place_for_software(root)
    return (
        job_software(cluster, request.nodes, root, dry_run=dry_run),
        contained(cluster, folders=folders, directory=request.directory, place=place, dry_run=dry_run),
    )


def _limit(site: Site, scheduler: Scheduler) -> float | None:
    """The seconds that a job has, where it does not say so itself."""
    first = chosen_partitions(site, scheduler)[0]
    return first.default_seconds or first.max_seconds


def _with_after(scheduler: Scheduler, request: Request) -> Scheduler:
    """The scheduler with the jobs that this one waits for."""
    for name in request.after:
        _check_is_known(name)
    wanted = [dependency for name in request.after if (dependency := dependency_on(name, request.runs)) is not None]
    given = [scheduler.dependency] if scheduler.dependency else []
    if not wanted:
        return scheduler
    return scheduler.model_copy(update={"dependency": ",".join([*given, *wanted])})


def _check_is_known(name: str) -> None:
    """Refuse to wait for a job that never was, or was so long ago that nobody knows how it ended."""
    if _JOB.fullmatch(name) and job_state(name) is None:
        raise InputError(
            f"--after: Slurm knows no job {name}, or not any more",
            hint="leave it out if that job has ended; squeue lists those that it knows",
            field="--after",
            found=name,
        )


def dependency_on(name: str, runs: Path) -> str | None:
    """A job by its number, or the newest job of a run; None if the run is finished: nothing is left to wait for."""
    if _JOB.fullmatch(name) or re.fullmatch(r"after\w+:[\d_:+]+", name):
        return name if ":" in name else f"afterok:{name}"
    run = RunDirectory.open(name, runs)
    status = read_status(run)
    if status is not None and status.state == "finished":
        return None
    jobs = submissions(run)
    if not jobs:
        raise InputError(
            f"--after: {run.name}/{run.id} is in no queue, so that no job can wait for it",
            hint="name a job by its number, or a run that was submitted",
            field="--after",
            found=name,
        )
    return f"afterok:{jobs[-1].job_id}"


def _check_array(site: Site, runs: int) -> None:
    if site.max_array_size is not None and runs > site.max_array_size:
        raise InputError(
            f"--sweep: {runs} runs, but this site takes arrays of {site.max_array_size} at most",
            hint="sweep over less, or submit in parts",
            field="--sweep",
            found=runs,
            allowed=site.max_array_size,
        )


def _files_of(job: Job) -> dict[str, str]:
    return {
        "cluster.yaml": job.cluster.to_yaml(),
        DESCRIPTION_FILE: job.description.to_json(),
        SCRIPT_FILE: job.script,
    }


def _sbatch(job: Job, works: Sequence[Prepared]) -> str:
    """The number of the job. An answer that got lost is looked for in the queue: the job may be there all the same."""
    script = job.runs[0].job / SCRIPT_FILE
    variables = submission_variables(job.description.sbatch_options)
    for prepared in works:
        variables |= prepared.work.unrecorded if isinstance(prepared.work, Script) else {}
    try:
        answer = answered(["sbatch", "--parsable", str(script)], environment=variables)
    except SlurmError as error:
        found = [j.job_id for j in queue(0).jobs.values() if j.command == str(script)] if passes(error) else []
        earlier = {submission.job_id for submission in submissions(job.runs[0])}
        new = [job_id.partition("_")[0] for job_id in found if job_id not in earlier]
        if new:
            return new[0]
        raise
    return answer.out.strip().splitlines()[-1].partition(";")[0]


def with_ranks_on_nodes(cluster: Cluster, ranks: int) -> int:
    """Ranks on each node of a job, all of which have as many: torchrun's nodes are alike."""
    if ranks % cluster.nodes:
        raise InputError(
            f"--nodes: {ranks} ranks cannot be shared out evenly among {cluster.nodes} nodes",
            hint=f"set --nproc, the ranks of each node, or --nodes {_divisor(ranks, cluster.nodes)}",
            field="--nodes",
            found=cluster.nodes,
            allowed=_divisor(ranks, cluster.nodes),
        )
    return ranks // cluster.nodes


def _divisor(ranks: int, most: int) -> int:
    return next(nodes for nodes in range(min(most, ranks), 0, -1) if ranks % nodes == 0)
