"""A rank of a job whose ranks MPI starts (`scheduler.launcher: mpi`), in place of torchrun.

`python -m gradus.launcher.mpi_rank RUN ATTEMPT ADDRESS PORT`, started once for each rank by `srun --mpi=...` or mpirun.
The first process follows the run, and says for each node how its ranks ended.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gradus.faults.stop_signals import ignore_stop_signals
from gradus.launcher.gathering import Gathering, Member, gathered
from gradus.launcher.script import COMMAND_FILE, Script
from gradus.launcher.slurm.allocation import allocation
from gradus.launcher.slurm.node import followed_by, launch_of, leave_with, task_parser
from gradus.launcher.slurm.node_ending import NodeEnding, write_node_ending
from gradus.launcher.taking_part import lead_ranks, take_part
from gradus.launcher.together import Together, started_together
from gradus.record.directory import RunDirectory


def main(arguments: Sequence[str] | None = None) -> int:
    given = task_parser().parse_args(arguments)
    ignore_stop_signals()
    run = RunDirectory(given.run)
    together = started_together() or Together(0, 1, "srun", "alone")
    if not together.leads:
        return take_part(together, run.control, lambda: Script.of_job(run.attempt_path(given.attempt) / COMMAND_FILE))
    with gathered(together, run.control) as gathering:
        return _lead(run, given.attempt, gathering, (given.address, given.port))


def _lead(run: RunDirectory, attempt: int, gathering: Gathering, at: tuple[str, int]) -> int:
    launch = launch_of(run, attempt, len(gathering.members))
    invitation = gathering.invite(run.path, attempt, at=at, deadline=launch.deadline)
    with followed_by(launch, leads=True) as followed:
        assert followed is not None, "this process leads"
        departure, codes = lead_ranks(launch, gathering, invitation, followed, sys.stdout)
    said = departure.said
    for number, node in enumerate(_nodes(gathering.members)):
        here = [member.process for member in gathering.members if member.node == node]
        told = [codes[process] for process in here if process in codes]
        if not told:
            continue  # a node that died says nothing, and that says it all
        code = next((code for code in told if code), 0)
        ending = NodeEnding(node, number, code, departure.ended_by, stop_reason=departure.stop_reason, said=said)
        write_node_ending(run, attempt, ending)
        said = {}  # once is enough
    return min(1, abs(departure.return_code))


def _nodes(members: Sequence[Member]) -> list[str]:
    """In the order of the job's list."""
    here = allocation()
    found = list(dict.fromkeys(member.node for member in members))
    return sorted(found, key=here.nodes.index) if here and set(found) <= set(here.nodes) else found


if __name__ == "__main__":
    leave_with(main)
