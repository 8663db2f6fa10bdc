"""A node's task in a job: starts this node's ranks under torchrun, and tells how they ended.

`python -m gradus.launcher.slurm.node RUN ATTEMPT ADDRESS PORT`, started by srun once on each node.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from gradus.faults.signals import SECOND_INTERRUPT
from gradus.faults.stop_signals import ignore_stop_signals
from gradus.hardware.detect import usable_cores
from gradus.launcher.attempt import Launch
from gradus.launcher.following import Following, following
from gradus.launcher.job_place import read_place
from gradus.launcher.node_ranks import NodeRanks, Part
from gradus.launcher.processes import swept
from gradus.launcher.script import COMMAND_FILE, Script
from gradus.launcher.script_stop import ScriptStop
from gradus.launcher.slurm.node_ending import NodeEnding, ended_badly, write_node_ending
from gradus.launcher.torchrun import Meeting
from gradus.record.directory import RunDirectory
from gradus.record.lock import locked
from gradus.record.node import node_name
from gradus.record.status import read_status, write_status
from gradus.record.stop import request_stop, requested_end
from gradus.schema.errors import GradusError
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

# When another node has failed, ranks here notice by themselves and have so long to say why and to commit what is saved.
_GRACE_SECONDS = 20.0


def launch_of(run: RunDirectory, attempt: int, ranks: int) -> Launch:
    """An attempt whose files are there."""
    folder = run.attempt_path(attempt)
    command = folder / COMMAND_FILE
    work = Script.of_job(command) if command.exists() else Recipe.load(folder / "recipe.yaml")
    place = read_place(run, attempt)
    return Launch(run, attempt, work, ranks, usable_cores(), deadline=place.deadline if place else None)


def run_node(launch: Launch, part: Part, *, leads: bool) -> NodeEnding:
    """Start the ranks of this node and follow them until they have left. The one that leads also tells of progress."""
    run, began = launch.run, time.monotonic()
    launch.log_path.parent.mkdir(parents=True, exist_ok=True)
    with (
        followed_by(launch, leads) as followed,
        launch.log_path.open("ab") as log,
        swept(run.path, launch.attempt, os.environ.get("SLURMD_NODENAME")) as held,
    ):
        ranks = NodeRanks(launch, part, log, held, of_a_job=True)
        if launch.script and leads:
            ranks.output.show(sys.stdout, sys.stderr)
        stop = ScriptStop(launch, followed.say if followed else lambda text: None) if launch.script else None
        others = _EndOfOthers(run, launch.attempt, part.meeting.node)

        def tell_others() -> None:
            if followed and followed.signals.at_once and requested_end(run) is None:
                request_stop(run, SECOND_INTERRUPT, now=True)

        ended_by = ranks.follow(followed, stop, also=tell_others, is_to_end=others.has_come)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    first = part.first_rank
    return NodeEnding(
        node=node_name(),
        number=part.meeting.node,
        return_code=ranks.return_code,
        ended_by=ended_by,
        after_others=others.came,
        stop_reason=stop.reason if stop else None,
        said={rank: ranks.output.last_words(rank) for rank in range(first, first + part.ranks)},
        cpu_seconds=used.ru_utime + used.ru_stime,
        peak_memory_bytes=used.ru_maxrss * 1024,
        wall_seconds=time.monotonic() - began,
    )


class _EndOfOthers:
    """Whether it is time to end the ranks here because those of another node have failed."""

    def __init__(self, run: RunDirectory, attempt: int, node: int) -> None:
        self._run, self._attempt, self._node = run, attempt, node
        self._since: float | None = None
        self.came = False

    def has_come(self) -> bool:
        if self._since is None and ended_badly(self._run, self._attempt, but=self._node):
            self._since = time.monotonic()
        self.came = self._since is not None and time.monotonic() - self._since > _GRACE_SECONDS
        return self.came


@contextlib.contextmanager
def followed_by(launch: Launch, leads: bool) -> Iterator[Following | None]:
    """The node that leads shows progress in the job's output, and turns signals into stop requests."""
    if not leads:
        yield None
        return
    with locked(launch.run):
        status = read_status(launch.run)
        if status is not None:  # from now on this process is the sign of life, until rank 0 is there
            write_status(launch.run, replace(status, pid=os.getpid()))
        with following(launch, stream=sys.stdout, plain=True) as followed:
            yield followed


def task_parser() -> argparse.ArgumentParser:
    """What the batch script tells a task that it starts on a node."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("address", help="of the first node")
    parser.add_argument("port", type=int)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = task_parser()
    parser.add_argument("--led", action="store_true", help="another process shows progress and answers signals")
    parsed = parser.parse_args(arguments)
    ignore_stop_signals()
    run = RunDirectory(parsed.run)
    nodes = int(os.environ["SLURM_STEP_NUM_NODES"])
    node = int(os.environ["SLURM_NODEID"])
    ranks = ranks_per_node(run, parsed.attempt, nodes)
    launch = launch_of(run, parsed.attempt, nodes * ranks)
    part = Part(ranks, launch.cores, Meeting(parsed.port, parsed.address, nodes, node))
    ending = run_node(launch, part, leads=node == 0 and not parsed.led)
    write_node_ending(run, parsed.attempt, ending)
    return min(1, abs(ending.return_code))


def ranks_per_node(run: RunDirectory, attempt: int, nodes: int) -> int:
    """As the plan of the attempt has it, or the command of a script."""
    folder = run.attempt_path(attempt)
    plan = folder / "plan.yaml"
    ranks = Plan.load(plan).mesh.world_size if plan.exists() else Script.load(folder / COMMAND_FILE).ranks
    return ranks // nodes


def leave_with(main: Callable[[], int]) -> NoReturn:
    """As a process of a job does: what is wrong with its files is told without a traceback, and counts."""
    try:
        sys.exit(main())
    except GradusError as error:
        print(f"gradus: error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    leave_with(main)
