"""A script's run: what can be checked from outside, and only then the files of the attempt."""

from __future__ import annotations

from pathlib import Path

from gradus.hardware.cluster import detect_cluster
from gradus.hardware.detect import Machine
from gradus.launcher.attempt import (
    Launch,
    Prepared,
    claim_run,
    is_of_a_script,
    last_attempt,
    usable_machine,
    write_attempt,
)
from gradus.launcher.script import COMMAND_FILE, Script, with_ranks
from gradus.launcher.slurm.step import cluster_of, other_nodes, ranks_of
from gradus.launcher.together import started_together
from gradus.record.directory import CHANGED_DATA_MARK, RunDirectory
from gradus.record.format import count_text
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.profile_request import PROFILE_FILE, ProfileRequest

# On the CPU a few ranks may share a core, to try things out; many more only wait for each other.
_MOST_RANKS_PER_CORE = 8


def prepare_script(
    script: Script,
    nproc: int | None = None,
    *,
    cluster: Cluster | None = None,
    runs: Path = Path("runs"),
    run_id: str | None = None,
    resume: str | None = None,
    accept_changed_data: bool = False,
    profile: ProfileRequest | None = None,
) -> Launch:
    """An attempt at a script."""
    machine, nodes = usable_machine(), other_nodes()
    if nodes is not None:
        cluster = cluster or cluster_of(nodes, machine)
        ranks = ranks_of(nodes, nproc, cluster)
    else:
        ranks = nproc or max(1, len(machine.gpus))
        _check_ranks(machine, ranks, cluster.nodes if cluster and started_together() else 1)
    prepared = prepared_script(with_ranks(script, ranks), accept_changed_data, profile)
    run, lock = claim_run(runs, prepared.name, run_id, resume, prepared.check_same_run)
    attempt = write_attempt(run, cluster or detect_cluster(machine), machine, prepared.files)
    return Launch(run, attempt, prepared.work, ranks, machine.cpu_cores, lock)


def prepared_script(
    script: Script, accept_changed_data: bool = False, profile: ProfileRequest | None = None
) -> Prepared:
    """A script that was checked, with the number of its ranks, and the files of an attempt at it."""
    files = {COMMAND_FILE: script.to_json(), **({CHANGED_DATA_MARK: ""} if accept_changed_data else {})}
    if profile is not None:
        profile.check_ranks(script.ranks)
        files[PROFILE_FILE] = profile.to_json()
    return Prepared(script, script.ranks, files, lambda run: _check_same_run(run, script))


def recorded_script(run: RunDirectory) -> Script:
    """The command of the last attempt, to be repeated."""
    script = Script.load(last_attempt(run) / COMMAND_FILE)
    if script.secrets_left_out:
        raise InputError(
            f"{run.path}: the command has arguments that look like secrets and were not recorded: {script.text}",
            hint=f"give it again: gradus train --resume {run.name}/{run.id} -- {script.text}",
            found=str(run.path),
        )
    if not script.directory.is_dir():
        raise InputError(
            f"{run.path}: the script ran in {script.directory}, which is not there any more",
            hint=f"give the command again, in another directory: gradus train --resume {run.path} -- {script.text}",
            found=str(script.directory),
        )
    return script


def _check_ranks(machine: Machine, ranks: int, nodes: int = 1) -> None:
    """`nodes` like this machine."""
    gpus, cores = len(machine.gpus), machine.cpu_cores
    most = nodes * (gpus or _MOST_RANKS_PER_CORE * cores)
    if ranks > most:
        has = count_text(gpus, "GPU") if gpus else f"no GPU and {count_text(cores, 'core')}"
        raise InputError(
            f"--nproc: {count_text(ranks, 'rank')}, but {machine.hostname} has {has}",
            hint='to run on the CPU on purpose, set CUDA_VISIBLE_DEVICES=""' if gpus else None,
            field="--nproc",
            found=ranks,
            allowed=most,
        )


def _check_same_run(run: RunDirectory, script: Script) -> None:
    if not is_of_a_script(run):
        raise InputError(
            f"{run.path}: the run is of a recipe, and not of a script",
            hint=f"gradus train --resume {run.name}/{run.id}",
            found=script.text,
        )
    before = Script.load(last_attempt(run) / COMMAND_FILE)
    if (before.kind, before.name) != (script.kind, script.name):
        raise InputError(
            f"--: the run began with {before.text!r}, found {script.text!r}; only its arguments may change",
            hint="start a new run for that",
            field="-- SCRIPT",
            found=script.text,
            allowed=before.text,
        )
