"""The ranks of one node: torchrun, what they print, and the end of both."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from gradus.faults.children import descendants
from gradus.faults.parent import end_with_parent
from gradus.faults.signals import SECOND_INTERRUPT
from gradus.faults.stop_signals import ignore_stop_signals
from gradus.launcher.attempt import Launch
from gradus.launcher.device_sampler import DeviceSampler, gpus_used_by
from gradus.launcher.drill_request import DrillWatch
from gradus.launcher.following import POLL_SECONDS, Following
from gradus.launcher.processes import marks, rank_processes
from gradus.launcher.rank_output import RankOutput, redirection
from gradus.launcher.script_profile import script_profile_variables
from gradus.launcher.script_stop import ScriptStop
from gradus.launcher.torchrun import LOOPBACK, Meeting, rank_environment, torchrun_command
from gradus.record.stop import requested_end
from gradus.record.variables import BIND, DEADLINE, DRY_RUN

RANK_MODULE = "gradus.training.rank_process"
_LOOK_EVERY_SECONDS = 1.0
_KILL_AFTER_SECONDS = 3.0


@dataclass(frozen=True)
class Part:
    """This node's part of an attempt's ranks."""

    ranks: int  # here
    cores: int
    meeting: Meeting

    @property
    def first_rank(self) -> int:
        return self.meeting.node * self.ranks


class NodeRanks:
    """A torchrun and its ranks. Under a scheduler none of them answers the signals that are sent to a whole job."""

    def __init__(self, launch: Launch, part: Part, log: BinaryIO, held: int, *, of_a_job: bool = False) -> None:
        self._launch = launch
        outputs = launch.log_path.parent / f"ranks-{part.meeting.node}"
        options = redirection(outputs)
        if of_a_job:
            options += ["--signals-to-handle=SIGHUP"]  # it would handle SIGTERM by ending its ranks
        self.process = subprocess.Popen(
            torchrun_command(part.ranks, part.meeting, _program(launch, of_a_job), options),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**_environment(launch, part), **({BIND: "1"} if of_a_job else {})},
            cwd=launch.script.directory if launch.script else None,
            pass_fds=[held],
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
            preexec_fn=partial(_before_it_starts, of_a_job, _ends_on_sigterm(launch)),
        )
        self._ends_by = signal.SIGHUP if of_a_job else signal.SIGTERM
        self.output = RankOutput(outputs, part.ranks, log, part.first_rank)
        gpus = gpus_used_by(part.ranks, launch.recipe)
        self._devices = DeviceSampler(launch.run, launch.attempt, gpus, partial(descendants, self.process.pid))

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def return_code(self) -> int:
        return self.process.wait()

    def processes(self) -> dict[int, int]:
        """Rank -> process id of those that are alive."""
        return rank_processes(self.process.pid)

    def follow(
        self,
        followed: Following | None,
        stop: ScriptStop | None,
        *,
        also: Callable[[], None] = lambda: None,
        is_to_end: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """Until they have left, or there is a reason to end them. Returns what ended them at once, if something did.

        `followed` is for whoever shows progress and answers signals, `stop` for the ranks of a script. `also` is done
        meanwhile, often; `is_to_end` is asked once a second.
        """
        run, look_at = self._launch.run, 0.0
        drill = DrillWatch(run, self._launch.attempt, self.processes)
        try:
            while self.running:
                if followed:
                    followed.poll()
                self.output.poll()
                if stop:
                    stop.poll(followed.signals.first if followed else None, self.processes)
                drill.poll()
                also()
                ends = bool(followed and (followed.signals.at_once or followed.silence.noticed()))
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + _LOOK_EVERY_SECONDS
                    ends = ends or requested_end(run) is not None or is_to_end()
                if ends:
                    self.end()
                time.sleep(POLL_SECONDS)
        finally:
            self.close()
        return requested_end(run) or (SECOND_INTERRUPT if followed and followed.signals.at_once else None)

    def end(self) -> None:
        """torchrun ends its ranks on a signal; if that takes long, it is killed, and its ranks are swept up."""
        if not _ends_on_sigterm(self._launch):
            for rank in self.processes().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
        self.process.send_signal(self._ends_by)
        try:
            self.process.wait(_KILL_AFTER_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        if self.running:
            self.end()  # ranks that nobody waits for must not go on
        self._devices.close()
        self.output.close()


def alone_on_this_machine(launch: Launch, port: int) -> Part:
    return Part(launch.ranks, launch.cores, Meeting(port, LOOPBACK))


def variables_of(launch: Launch) -> dict[str, str]:
    """By which ranks know that they are to build everything, make one step and leave; or until when they may train."""
    deadline = {DEADLINE: str(launch.deadline)} if launch.deadline is not None else {}
    return {**({DRY_RUN: "1"} if launch.dry_run else {}), **deadline, **script_profile_variables(launch)}


def _ends_on_sigterm(launch: Launch) -> bool:
    """Whether its ranks do: a foreign script's. Others take it for a stop request, and hear of those in another way."""
    return launch.script is not None and not launch.has_own_loop


def _before_it_starts(of_a_job: bool, ranks_end_on_sigterm: bool) -> None:
    # On SIGTERM torchrun asks its ranks to end, and waits for them; killed, it leaves them to the sweeper.
    end_with_parent(signal.SIGTERM if ranks_end_on_sigterm and not of_a_job else signal.SIGKILL)
    if of_a_job:
        ignore_stop_signals()


def _program(launch: Launch, of_a_job: bool) -> Sequence[str]:
    if launch.script is None:
        return ["--module", RANK_MODULE, str(launch.run.path), str(launch.attempt)]
    if not of_a_job:
        return launch.script.torchrun_arguments
    # A script's ranks are told by SIGTERM, as they are anywhere else.
    return ["--no-python", sys.executable, "-m", "gradus.launcher.script_rank", *launch.script.command]


def _environment(launch: Launch, part: Part) -> Mapping[str, str]:
    variables = rank_environment(part.ranks, part.cores, launch.recipe)
    variables.pop(DRY_RUN, None)
    return {**variables, **marks(launch.run.path, launch.attempt), **variables_of(launch)}
