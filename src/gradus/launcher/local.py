"""Local: ranks on this machine, started, watched and brought to an orderly end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TextIO

from gradus.faults.parent import end_with_parent
from gradus.launcher.attempt import Launch
from gradus.launcher.ending import Departure, note_failure, result_of
from gradus.launcher.following import POLL_SECONDS, Following, following
from gradus.launcher.given import Given, Overrides, recipe_given
from gradus.launcher.processes import marks, rank_processes, swept
from gradus.launcher.rank_output import RankOutput, redirection, without_rank_lines
from gradus.launcher.recipe_run import prepare
from gradus.launcher.rendezvous import Rendezvous
from gradus.launcher.result import Result
from gradus.launcher.script_stop import ScriptStop
from gradus.launcher.torchrun import free_port, port_taken_in_log, rank_environment, torchrun_command
from gradus.record.lock import release
from gradus.record.outcome import read_outcome
from gradus.record.stop import requested_end
from gradus.record.variables import DRY_RUN
from gradus.schema.cluster import Cluster

_RANK_MODULE = "gradus.training.rank"
_KILL_AFTER_SECONDS = 3.0
_LOOK_EVERY_SECONDS = 1.0
_NEVER_MET = (
    "no rank ever connected to another: unless the script shares out its work by RANK itself, all {ranks} ranks did "
    "the same. Call torch.distributed.init_process_group() and wrap the model in DistributedDataParallel, or use the "
    "launcher-aware objects of your framework (Accelerator, Trainer, Fabric)"
)


def train(
    recipe: Given,
    nproc: int | None = None,
    *,
    overrides: Overrides = (),
    cluster: Cluster | None = None,
    runs: str | Path = "runs",
    run_id: str | None = None,
    resume: str | None = None,
    quiet: bool = False,
) -> Result:
    """Train a recipe on this machine: start the ranks, wait, and return how it ended.

    The recipe is a path, a dict or a Recipe; `overrides` are `["optimizer.lr=1e-3"]` or `{"optimizer.lr": 1e-3}`.
    A bad recipe raises; a run that fails does not: its result has the state `failed` and the error. An interrupt asks
    the run to save and stop; it then has the state `stopped`. A second one ends it at once.
    """
    given = recipe_given(recipe, overrides)
    launch = prepare(given, nproc, cluster=cluster, runs=Path(runs), run_id=run_id, resume=resume)
    try:
        result = launch_local(launch, quiet=quiet)
    finally:
        if launch.lock is not None:
            release(launch.lock)  # now, and not when the launch is collected: the next call may go on with this run
    if result.error and not quiet:
        print(f"error: {result.error['message']}", file=sys.stderr)
    return result


def launch_local(
    launch: Launch, *, quiet: bool = False, stream: TextIO | None = None, stdout: TextIO | None = None
) -> Result:
    """Start torchrun, follow its ranks to their end, and report how it went.

    What rank 0 of a script prints on stdout is shown on `stdout`.
    """
    try:
        with following(launch, quiet=quiet, stream=stream) as followed:
            departure = _run_torchrun(launch, followed, stdout)
            if departure.return_code > 0 and not departure.at_once and _lost_its_port(launch):
                followed.say("another process took the port of the ranks: starting them once more with another one")
                departure = _run_torchrun(launch, followed, stdout)
    except BaseException as error:
        note_failure(launch, error)
        raise
    return result_of(launch, departure)


def _run_torchrun(launch: Launch, followed: Following, stdout: TextIO | None) -> Departure:
    """Start the ranks and follow them until torchrun leaves."""
    port = free_port()
    with launch.log_path.open("ab") as log, swept(launch.run.path, launch.attempt) as held:
        outputs = launch.log_path.parent / "ranks"
        process = subprocess.Popen(
            torchrun_command(launch.ranks, port, _program(launch), redirection(outputs)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(launch),
            cwd=launch.script.directory if launch.script else None,
            pass_fds=[held],
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # on which it takes its ranks along
        )
        output = RankOutput(outputs, launch.ranks, log)
        if launch.script and not followed.quiet:
            output.show(stdout or sys.stdout, sys.stderr)
        script = _ScriptWatch(launch, followed, port) if launch.script else None
        look_at, ended_by = 0.0, None
        try:
            while process.poll() is None:
                followed.poll()
                output.poll()
                if script:
                    script.poll(process.pid)
                if time.monotonic() >= look_at:  # from a machine that cannot kill them it is only asked for
                    look_at = time.monotonic() + _LOOK_EVERY_SECONDS
                    ended_by = requested_end(launch.run)
                if followed.signals.at_once or ended_by:
                    _end_now(process)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                _end_now(process)  # ranks that nobody waits for must not go on
            output.close()
    if script:
        script.met.poll(now=True)
    ended_by = requested_end(launch.run)
    return Departure(
        process.returncode,
        followed.signals.at_once or ended_by is not None,
        script.stop.reason if script else None,
        {rank: output.last_words(rank) for rank in range(launch.ranks)},
        script.problems(process.returncode) if script else (),
        at_once_by=ended_by or "a second interrupt",
    )


class _ScriptWatch:
    """What is looked after for ranks that know nothing of gradus."""

    def __init__(self, launch: Launch, followed: Following, port: int) -> None:
        self._launch = launch
        self._signals = followed.signals
        self.stop = ScriptStop(launch, followed.say)
        self.met = Rendezvous(port)

    def poll(self, torchrun: int) -> None:
        self.stop.poll(self._signals.first, lambda: rank_processes(torchrun))
        if self._launch.ranks > 1:
            self.met.poll(lambda: rank_processes(torchrun).values())

    def problems(self, return_code: int) -> list[str]:
        """Only of a script that ended well: one that failed has other things to say."""
        alone = self._launch.ranks == 1 or self._launch.has_own_loop or self.stop.reason is not None
        if return_code == 0 and not alone and self.met.never_met:
            return [_NEVER_MET.format(ranks=self._launch.ranks)]
        return []


def _program(launch: Launch) -> list[str]:
    if launch.script:
        return launch.script.torchrun_arguments
    return ["--module", _RANK_MODULE, str(launch.run.path), str(launch.attempt)]


def _environment(launch: Launch) -> Mapping[str, str]:
    variables = rank_environment(launch.ranks, launch.cores, launch.recipe)
    variables.pop(DRY_RUN, None)
    return {**variables, **marks(launch.run.path, launch.attempt), **dry_run_variables(launch)}


def dry_run_variables(launch: Launch) -> dict[str, str]:
    """By which ranks know that they are to build everything, make one step and leave."""
    return {DRY_RUN: "1"} if launch.dry_run else {}


def _lost_its_port(launch: Launch) -> bool:
    """Whether torchrun found its port taken between `free_port` and its own start, and so started no rank at all."""
    log = without_rank_lines(launch.log_path.read_text(errors="replace"))
    return read_outcome(launch.run, launch.attempt) is None and port_taken_in_log(log)


def _end_now(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks on SIGTERM; if that takes long, it is killed, and its ranks are swept up."""
    process.terminate()
    try:
        process.wait(_KILL_AFTER_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
