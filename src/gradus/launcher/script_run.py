"""A script's run: what can be checked from outside, and only then the files of the attempt."""

from __future__ import annotations

from pathlib import Path

from gradus.hardware.cluster import detect_cluster
from gradus.hardware.detect import Machine
from gradus.launcher.attempt import Launch, claim_run, is_of_a_script, last_attempt, usable_machine, write_attempt
from gradus.launcher.script import COMMAND_FILE, Script, with_ranks
from gradus.record.directory import RunDirectory
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError

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
) -> Launch:
    """An attempt at a script."""
    machine = usable_machine()
    ranks = nproc or max(1, len(machine.gpus))
    _check_ranks(machine, ranks)
    script = with_ranks(script, ranks)
    run, lock = claim_run(runs, script.name, run_id, resume, lambda run: _check_same_run(run, script))
    attempt = write_attempt(run, cluster or detect_cluster(machine), machine, {COMMAND_FILE: script.to_json()})
    return Launch(run, attempt, script, ranks, machine.cpu_cores, lock)


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


def _check_ranks(machine: Machine, ranks: int) -> None:
    gpus, cores = len(machine.gpus), machine.cpu_cores
    most = gpus or _MOST_RANKS_PER_CORE * cores
    if ranks > most:
        has = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else f"no GPU and {cores} core{'s' if cores > 1 else ''}"
        raise InputError(
            f"--nproc: {ranks} ranks, but {machine.hostname} has {has}",
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
