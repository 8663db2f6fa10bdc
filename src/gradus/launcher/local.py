"""Local: ranks on this machine, started, watched and brought to an orderly end."""

from __future__ import annotations

import sys
from typing import TextIO

from gradus.launcher.attempt import Launch
from gradus.launcher.ending import Departure, note_failure, result_of
from gradus.launcher.following import Following, following
from gradus.launcher.node_ranks import NodeRanks, alone_on_this_machine
from gradus.launcher.processes import swept
from gradus.launcher.rank_output import without_rank_lines
from gradus.launcher.rendezvous import Rendezvous
from gradus.launcher.result import Result
from gradus.launcher.script_stop import ScriptStop
from gradus.launcher.torchrun import free_port, port_taken_in_log
from gradus.record.outcome import read_outcome

_NEVER_MET = (
    "no rank ever connected to another: unless the script shares out its work by RANK itself, all {ranks} ranks did "
    "the same. Call torch.distributed.init_process_group() and wrap the model in DistributedDataParallel, or use the "
    "launcher-aware objects of your framework (Accelerator, Trainer, Fabric)"
)


def launch_local(
    launch: Launch, *, quiet: bool = False, stream: TextIO | None = None, stdout: TextIO | None = None
) -> Result:
    """Start torchrun, follow its ranks to their end, and report how it went.

    What rank 0 of a script prints on stdout is shown on `stdout`.
    """
    try:
        with following(launch, quiet=quiet, stream=stream) as followed:
            departure = _run_torchrun(launch, followed, stdout)
            if departure.return_code > 0 and not departure.ended_by and _lost_its_port(launch):
                followed.say("another process took the port of the ranks: starting them once more with another one")
                departure = _run_torchrun(launch, followed, stdout)
    except BaseException as error:
        note_failure(launch, error)
        raise
    return result_of(launch, departure)


def _run_torchrun(launch: Launch, followed: Following, stdout: TextIO | None) -> Departure:
    """Start the ranks and follow them until torchrun leaves."""
    part = alone_on_this_machine(launch, free_port())
    with launch.log_path.open("ab") as log, swept(launch.run.path, launch.attempt) as held:
        ranks = NodeRanks(launch, part, log, held)
        if launch.script and not followed.quiet:
            ranks.output.show(stdout or sys.stdout, sys.stderr)
        stop = ScriptStop(launch, followed.say) if launch.script else None
        met = Rendezvous(part.meeting.port) if launch.script and launch.ranks > 1 else None

        def look() -> None:
            if met:
                met.poll(lambda: ranks.processes().values())

        ended_by = ranks.follow(followed, stop, also=look)
    stop_reason = stop.reason if stop else None
    return Departure(
        ranks.return_code,
        ended_by,
        stop_reason,
        {rank: ranks.output.last_words(rank) for rank in range(launch.ranks)},
        _never_met(launch, met) if met and ranks.return_code == 0 and stop_reason is None else (),
    )


def _never_met(launch: Launch, met: Rendezvous) -> list[str]:
    """What is odd about a script that ended well: one that failed has other things to say."""
    met.poll(now=True)
    return [_NEVER_MET.format(ranks=launch.ranks)] if met.never_met and not launch.has_own_loop else []


def _lost_its_port(launch: Launch) -> bool:
    """Whether torchrun found its port taken between `free_port` and its own start, and so started no rank at all."""
    log = without_rank_lines(launch.log_path.read_text(errors="replace"))
    return read_outcome(launch.run, launch.attempt) is None and port_taken_in_log(log)
