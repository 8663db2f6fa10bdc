"""Starting a preflight by itself: on the nodes of the job that this is in, in a small job of its own, or here."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradus.launcher.preflight.node import alone
from gradus.launcher.preflight.report import Finding, Preflight, read_report
from gradus.launcher.slurm.allocation import Allocation, allocation
from gradus.launcher.slurm.commands import answered, job_state, run_slurm
from gradus.launcher.slurm.options import (
    file_name,
    header_word,
    sbatch_options,
    settled,
    shape_of,
    srun_options,
    submission_variables,
)
from gradus.launcher.slurm.reasons import explained_reason
from gradus.launcher.slurm.script import node_tasks
from gradus.launcher.software import environment_lines, python_of
from gradus.record.format import count_text
from gradus.schema.cluster import Cluster
from gradus.schema.errors import GradusError, InputError

Say = Callable[[str], None]
_TASK_MODULE = "gradus.launcher.preflight.slurm_task"
_JOB_MINUTES = 3
_STEP_SECONDS = 150.0  # a task that cannot be started keeps srun waiting


@dataclass(frozen=True)
class Asked:
    """What to look at. Without a number of nodes: those of this job, else one."""

    cluster: Cluster | None
    nodes: int | None
    runs: Path


def run_preflight(asked: Asked, say: Say) -> Preflight:
    here = allocation()
    if here is not None:
        return _in_allocation(asked, here, say)
    on_slurm = asked.cluster is not None and asked.cluster.scheduler.kind == "slurm"
    if asked.cluster is None and asked.nodes is not None and shutil.which("sbatch"):
        on_slurm = True
    if on_slurm:
        return _as_a_job(asked, say)
    if asked.nodes not in (None, 1):
        raise InputError(
            f"--nodes: found {asked.nodes}, but there is no Slurm here, so that only this machine can be looked at",
            hint="give a cluster file whose scheduler is slurm, or run it inside of a job",
            field="--nodes",
            found=asked.nodes,
            allowed=1,
        )
    with _folder(asked.runs) as folder:
        return alone(folder, asked.cluster)


def _in_allocation(asked: Asked, here: Allocation, say: Say) -> Preflight:
    nodes = asked.nodes or len(here.nodes)
    if nodes > len(here.nodes):
        raise InputError(
            f"--nodes: found {nodes}, but job {here.job_id} has {len(here.nodes)}",
            field="--nodes",
            found=nodes,
            allowed=len(here.nodes),
        )
    say(f"preflight of {count_text(nodes, 'node')} of job {here.job_id}")
    with _folder(asked.runs) as folder:
        step = ["srun", "--overlap", *node_tasks(nodes), *_task(folder, asked.cluster)]
        # A task of srun's own step, as in `srun --pty bash`, would hand its variables on.
        done = _run(step, _STEP_SECONDS, {k: v for k, v in os.environ.items() if not k.startswith("SLURM_STEP_")})
        found = read_report(folder / "preflight.json")
        return found or _no_report(here.nodes[:nodes], done)


def _as_a_job(asked: Asked, say: Say) -> Preflight:
    """sbatch, since its job goes through the same doors as later ones: environment, modules, partition."""
    cluster = asked.cluster or Cluster.detect()
    nodes = asked.nodes or 1
    if nodes > cluster.nodes:
        raise InputError(
            f"--nodes: found {nodes}, but {cluster.name} has {cluster.nodes}",
            field="--nodes",
            found=nodes,
            allowed=cluster.nodes,
        )
    scheduler = settled(cluster.scheduler).model_copy(
        update={"time": f"0:{_JOB_MINUTES:02}:00", "launcher": "torchrun", "dependency": None, "requeue": False}
    )
    with _folder(asked.runs) as folder:
        output = folder / "job.out"
        shape = shape_of(cluster, nodes, max(1, cluster.gpus_per_node))
        written_to = file_name(str(output))
        header = sbatch_options(scheduler, shape, name="gradus-preflight", output=written_to, lead_seconds=1)
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {header_word(option)}" for option in header),
            *environment_lines(cluster.environment),
        ]
        lines.append("export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}")
        step = shlex.join(["srun", *srun_options(scheduler), *node_tasks(nodes)])
        _, *task = _task(folder, cluster)
        script = folder / "preflight.sh"
        script.write_text(
            "\n".join([*lines, f"exec {step} {python_of(cluster.environment)} {shlex.join(task)}"]) + "\n"
        )
        command, variables = ["sbatch", "--parsable", str(script)], submission_variables(header)
        job = answered(command, retry_seconds=20, environment=variables).out.strip().partition(";")[0]
        say(f"preflight of {count_text(nodes, 'node')} as job {job}; waiting for it")
        _wait_for(job, say)
        found = read_report(folder / "preflight.json")
        if found is not None:
            return found
        words = output.read_text(errors="replace") if output.exists() else ""
        return _no_report([f"of job {job}"], subprocess.CompletedProcess([], 1, words, ""))


def _wait_for(job: str, say: Say) -> None:
    said = None
    try:
        while True:
            state = job_state(job, retry_seconds=60)
            if state is None or state.is_over:
                return
            if state.waits and state.reason != said:
                said = state.reason
                say(f"job {job} waits: {explained_reason(state.reason).text}")
            time.sleep(1.0)
    except BaseException:
        run_slurm(["scancel", job])
        raise


def _task(folder: Path, cluster: Cluster | None) -> list[str]:
    words = [sys.executable, "-m", _TASK_MODULE, str(folder), str(folder / "preflight.json")]
    if cluster is not None:
        (folder / "cluster.yaml").write_text(cluster.to_yaml())
        words.append(str(folder / "cluster.yaml"))
    return words


@contextmanager
def _folder(runs: Path) -> Iterator[Path]:
    """A folder beside the runs, which every node should see as it will have to see them; gone afterwards."""
    made: list[Path] = []
    for folder in reversed([runs.absolute(), *runs.absolute().parents]):
        if not folder.is_dir():
            folder.mkdir(mode=0o700)
            made.append(folder)
    folder = Path(tempfile.mkdtemp(prefix=".preflight-", dir=runs.absolute()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in reversed(made):
            try:
                parent.rmdir()
            except OSError:
                break


def _run(command: Sequence[str], seconds: float, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=variables, check=False)
    except subprocess.TimeoutExpired as late:
        words = late.stderr.decode(errors="replace") if isinstance(late.stderr, bytes) else late.stderr or ""
        return subprocess.CompletedProcess(command, 124, "", f"{words}\nno end after {seconds:.0f} s")
    except OSError as error:
        raise GradusError(f"srun cannot be run: {error.strerror}") from error


def _no_report(names: Sequence[str], done: subprocess.CompletedProcess[str]) -> Preflight:
    """Not even the first node's task came to its end: what Slurm says is all there is."""
    words = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    blamed = tuple(name for name in names if any(f"node {name}" in line or f" {name}:" in line for line in words))
    text = "the tasks could not be started, or the first node's did not come to its end: "
    text += "; ".join(words[-3:]) or f"srun left with {done.returncode} and said nothing"
    return Preflight(tuple(names), (Finding("nodes", "error", text, blamed),), 0.0)
