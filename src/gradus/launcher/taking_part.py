"""Taking part: what each of the processes that were started together does once there is an attempt.

Each starts its rank, or the ranks of its node, and follows them. Process 0 shows progress, turns signals into stop
requests, and leaves with the run's exit code; the others leave with 0, and after it: a starter ends everybody when one
leaves badly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from gradus.faults.signals import SECOND_INTERRUPT
from gradus.faults.stop_signals import ignore_stop_signals
from gradus.hardware.detect import usable_cores
from gradus.launcher.attempt import Launch
from gradus.launcher.drill_request import DrillWatch
from gradus.launcher.ending import Departure, note_failure, result_of
from gradus.launcher.following import POLL_SECONDS, Following, following
from gradus.launcher.gathering import Gathering, Guest, Invitation, Left
from gradus.launcher.node_ranks import Part
from gradus.launcher.processes import kill_left_over
from gradus.launcher.result import Result
from gradus.launcher.script import COMMAND_FILE, Script
from gradus.launcher.script_stop import ScriptStop
from gradus.launcher.single_rank import SingleRank
from gradus.launcher.slurm.node_ending import departure_of, node_endings, write_node_ending
from gradus.launcher.together import Together
from gradus.launcher.torchrun import Meeting
from gradus.record.directory import RunDirectory
from gradus.record.lock import release
from gradus.record.stop import requested_end, requested_stop
from gradus.schema.errors import EXIT_FINISHED
from gradus.schema.recipe import Recipe

_LOOK_EVERY_SECONDS = 1.0
# When one rank has failed, the others notice by themselves and have so long to say why and to commit what is saved.
_GRACE_SECONDS = 20.0
_LAST_SECONDS = 15.0  # for the others to end their ranks when they are told to
_LEAVE_AFTER_SECONDS = 60.0  # without a sign of process 0

Said = dict[int, list[str]]  # the last lines of each rank


def lead(launch: Launch, gathering: Gathering, each: int, *, stdout: TextIO | None = None) -> Result:
    """Process 0: invite the others, run its own ranks, and tell how all ended."""
    try:
        invitation = gathering.invite(
            launch.run.path, launch.attempt, each, deadline=launch.deadline, dry_run=launch.dry_run
        )
        if each > 1:
            departure = _lead_nodes(launch, gathering, invitation)
        else:
            with following(launch) as followed:
                departure, _ = lead_ranks(launch, gathering, invitation, followed, stdout)
    except BaseException as error:
        note_failure(launch, error)
        raise
    return result_of(launch, departure)


def take_part(together: Together, runs: Path, script: Callable[[], Script]) -> int:
    """The other processes. What they leave with never is the run's own code: process 0 has that.

    `script` gives the one that this process was started with: what is recorded of it has no secrets in it.
    """
    guest = Guest(together, runs)
    invitation = guest.invitation()
    if invitation is None:
        return EXIT_FINISHED  # process 0 says why
    ignore_stop_signals(signal.SIGINT)  # process 0 turns them into a stop request, for all
    launch = _launch(invitation, script)
    said: Said = {}
    if invitation.place.ranks > 1:
        code = _run_node(launch, invitation, leads=False)
    else:
        code, said = _run_rank(launch, invitation, lambda: guest.is_to_end)
    guest.tell(code, said)
    guest.wait_until_over(_LEAVE_AFTER_SECONDS)
    return EXIT_FINISHED


def _launch(invitation: Invitation, script: Callable[[], Script]) -> Launch:
    run = RunDirectory(Path(invitation.run))
    folder = run.attempt_path(invitation.attempt)
    work = script() if (folder / COMMAND_FILE).exists() else Recipe.load(folder / "recipe.yaml")
    made = (run.path,) if invitation.dry_run else ()
    ranks = invitation.place.world_size
    return Launch(run, invitation.attempt, work, ranks, usable_cores(), None, made, invitation.deadline)


@contextlib.contextmanager
def _started(launch: Launch, invitation: Invitation) -> Iterator[SingleRank]:
    launch.log_path.parent.mkdir(parents=True, exist_ok=True)
    with launch.log_path.open("ab") as log:
        rank = _start(launch, invitation, log)
        try:
            yield rank
        finally:
            rank.close()
            kill_left_over(launch.run.path, launch.attempt, rank=rank.rank)


def _start(launch: Launch, invitation: Invitation, log: BinaryIO) -> SingleRank:
    return SingleRank(launch, invitation.place, invitation.address, invitation.port, log)


def _run_rank(launch: Launch, invitation: Invitation, is_to_end: Callable[[], bool]) -> tuple[int, Said]:
    told, look_at = False, 0.0
    with _started(launch, invitation) as rank:
        drill = DrillWatch(launch.run, launch.attempt, rank.processes)
        while rank.running:
            rank.output.poll()
            drill.poll()
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + _LOOK_EVERY_SECONDS
                if is_to_end() or requested_end(launch.run):
                    rank.end()
                if launch.script and not told and not launch.has_own_loop and requested_stop(launch.run):
                    told = True
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rank.process.pid, signal.SIGTERM)
            time.sleep(POLL_SECONDS)
    return rank.process.returncode, {rank.rank: rank.last_words()}


def lead_ranks(
    launch: Launch, gathering: Gathering, invitation: Invitation, followed: Following, stdout: TextIO | None
) -> tuple[Departure, dict[int, int]]:
    """Process 0's own rank, and how all of them left: together, and by process."""
    others = _Others(gathering)
    stop = ScriptStop(launch, followed.say) if launch.script else None
    look_at = 0.0
    with _started(launch, invitation) as rank:
        drill = DrillWatch(launch.run, launch.attempt, rank.processes)
        if launch.script and not followed.quiet:
            rank.output.show(stdout or sys.stdout, sys.stderr)
        while rank.running or not others.are_done(rank.process.returncode):
            followed.poll()
            rank.output.poll()
            drill.poll()
            if stop:
                stop.poll(followed.signals.first, rank.processes)
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + _LOOK_EVERY_SECONDS
                now = followed.signals.at_once or requested_end(launch.run) or followed.silence.noticed()
                if now or others.failed_long_ago(rank.process.poll()):
                    gathering.end_all()
                    others.told_to_end()
                    if rank.running:
                        rank.end()
            time.sleep(POLL_SECONDS)
    ended_by = requested_end(launch.run) or (SECOND_INTERRUPT if followed.signals.at_once else None)
    left = gathering.left()
    codes = {0: rank.process.returncode} | {process: one.code for process, one in left.items()}
    said = {number: lines for one in left.values() for number, lines in one.said.items()}
    silent = others.missing(left)
    departure = Departure(
        next((code for code in codes.values() if code), int(bool(silent))),
        ended_by,
        stop.reason if stop else None,
        {rank.rank: rank.last_words(), **said},
        silent,
    )
    return departure, codes


class _Others:
    """The other processes, as process 0 sees them."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self._failed_at: float | None = None
        self._end_told_at: float | None = None

    def told_to_end(self) -> None:
        self._end_told_at = self._end_told_at or time.monotonic()

    def failed_long_ago(self, own_code: int | None) -> bool:
        bad = bool(own_code) or any(left.code for left in self._gathering.left().values())
        if bad and self._failed_at is None:
            self._failed_at = time.monotonic()
        return self._failed_at is not None and time.monotonic() - self._failed_at > _GRACE_SECONDS

    def are_done(self, own_code: int | None) -> bool:
        """Whether all have left, or those that have not were told to end and had time for it."""
        if len(self._gathering.left()) == len(self._gathering.members) - 1:
            return True
        return self._end_told_at is not None and time.monotonic() - self._end_told_at > _LAST_SECONDS

    def missing(self, left: dict[int, Left]) -> list[str]:
        silent = [member for member in self._gathering.members[1:] if member.process not in left]
        return [f"process {member.process} on {member.node} has left without a word" for member in silent]


def _lead_nodes(launch: Launch, gathering: Gathering, invitation: Invitation) -> Departure:
    """One process on each node: the node's task of a job does the rest."""
    if launch.lock is not None:
        release(launch.lock)  # which it takes itself
    code = _run_node(launch, invitation, leads=True)
    until = time.monotonic() + _GRACE_SECONDS + _LAST_SECONDS
    while len(gathering.left()) < len(gathering.members) - 1 and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return departure_of(node_endings(launch.run, launch.attempt), code)


def _run_node(launch: Launch, invitation: Invitation, *, leads: bool) -> int:
    from gradus.launcher.slurm.node import run_node

    place = invitation.place
    meeting = Meeting(invitation.port, invitation.address, place.nodes, place.node)
    ending = run_node(launch, Part(place.ranks, usable_cores(), meeting), leads=leads)
    write_node_ending(launch.run, launch.attempt, ending)
    return ending.return_code
