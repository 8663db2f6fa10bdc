"""Ranks of a benchmark: started on this machine, on the nodes of the allocation that this is in, or, where srun, mpirun
or torchrun has started this command several times over, as one rank for each of these processes.

A rank is a module that gets what is asked for as JSON, and of which rank 0 says what it finds in lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gradus.faults.children import kill_descendants
from gradus.faults.parent import end_with_parent
from gradus.hardware.detect import detect_machine, usable_cores
from gradus.launcher.gathering import Gathering, Guest, Invitation, gathered
from gradus.launcher.slurm.description import rendezvous_port
from gradus.launcher.slurm.script import node_tasks
from gradus.launcher.slurm.step import other_nodes
from gradus.launcher.together import started_together
from gradus.launcher.torchrun import LOOPBACK, Meeting, free_port, torchrun_command
from gradus.record.variables import GPU, OWN
from gradus.schema.errors import EXIT_BAD_INPUT, GradusError, InputError

_LAST_WORDS = 12  # lines
_LOOK_SECONDS = 0.2
_LEAVE_AFTER_SECONDS = 60.0  # without a sign of process 0

Said = Iterator[dict[str, Any]]


def said_by_ranks(
    module: str,
    asked: Mapping[str, Any],
    nproc: int | None,
    *,
    runs: Path = Path("runs"),
    variables: Mapping[str, str] | None = None,
) -> Said:
    """What rank 0 says, line by line; nothing in a process that only takes part.

    Without `nproc` there is a rank for each GPU, else one. Processes that were started together meet in `runs`.
    """
    program = ["--module", module, json.dumps(dict(asked))]
    extra = dict(variables or {})
    if leads() is not None and "TORCHELASTIC_RUN_ID" in os.environ:
        yield from _said_by([sys.executable, "-m", module, json.dumps(dict(asked))], extra)
        return
    together = started_together()
    if together is not None:
        if not together.leads:
            _take_part(Guest(together, runs), module, asked, extra)
            return
        with gathered(together, runs) as gathering:
            each = gathering.ranks_each(nproc)
            command, of_rank = _of_place(gathering.invite(runs, 1, each), module, asked)
            yield from _said_by(command, {**extra, **of_rank}, failed=lambda: _failure_elsewhere(gathering))
        return
    yield from _said_by(_command(program, nproc), extra)


def leads() -> bool | None:
    """Whether this process is the first of several that were started together; None where it is alone."""
    if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    together = started_together()
    return None if together is None else together.leads


def check_one_process() -> None:
    """Refuse trials in each of several processes: every one of them would start its own ranks."""
    if leads() is None:
        return
    raise InputError(
        "trials start their ranks themselves, on one node, and this is one of several processes",
        hint="start it once: `srun -N 1 -n 1 gradus ...`, with --nproc for the number of ranks",
        field="--nproc",
        found="several processes",
        allowed="one",
    )


def check_one_machine(command: str) -> None:
    """Refuse what chooses its own numbers of ranks where others have chosen them, or where they would be per node."""
    if leads() is None and other_nodes() is None:
        return
    raise InputError(
        f"{command}: it starts its ranks itself, on one machine, and this is one of several processes or nodes",
        hint="run `srun -n N gradus bench synthetic ... > N.txt` for each N, and then "
        "`gradus bench scaling --log 1.txt --log 2.txt`",
        field="--ranks",
        found="several processes or nodes",
        allowed="one machine",
    )


def _command(program: Sequence[str], nproc: int | None) -> list[str]:
    nodes = other_nodes()
    if nodes is None:
        ranks = nproc or len(detect_machine().gpus) or 1
        if ranks == 1:
            return [sys.executable, "-m", *program[1:]]
        return torchrun_command(ranks, Meeting(free_port(), LOOPBACK), program)
    ranks = nproc or nodes.gpus_per_node or 1
    port = rendezvous_port(nodes.job_id, os.getpid())
    task = [sys.executable, "-m", "gradus.bench.ranks", str(ranks), nodes.address(), str(port), *program]
    return ["srun", "--overlap", *node_tasks(len(nodes.nodes)), *task]


def _of_place(invitation: Invitation, module: str, asked: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The command of a process that was invited, and the variables by which its rank finds the others."""
    place, text = invitation.place, json.dumps(dict(asked))
    if place.ranks > 1:
        meeting = Meeting(invitation.port, invitation.address, place.nodes, place.node)
        return torchrun_command(place.ranks, meeting, ["--module", module, text]), {}
    return [sys.executable, "-m", module, text], {
        "RANK": str(place.first_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": invitation.address,
        "MASTER_PORT": str(invitation.port),
        **({GPU: OWN} if place.own_gpu else {}),
    }


def _take_part(guest: Guest, module: str, asked: Mapping[str, Any], extra: Mapping[str, str]) -> None:
    """A process that does not lead: its rank, and how that ended. What goes wrong, process 0 says."""
    invitation = guest.invitation()
    if invitation is None:
        return
    command, of_rank = _of_place(invitation, module, asked)
    with tempfile.TemporaryFile("w+") as errors:
        process = _started(command, {**extra, **of_rank}, subprocess.DEVNULL, errors)
        while process.poll() is None and not guest.is_to_end:
            time.sleep(_LOOK_SECONDS)
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LEAVE_AFTER_SECONDS / 10)  # process 0's rank is done, so this one is about to be
        _end(process)
        errors.seek(0)
        words = errors.read().strip().splitlines()
    guest.tell(process.returncode, {invitation.place.first_rank: words[-_LAST_WORDS:]})
    guest.wait_until_over(_LEAVE_AFTER_SECONDS)


def _failure_elsewhere(gathering: Gathering) -> GradusError | None:
    for left in gathering.left().values():
        if left.code:
            words = [line for lines in left.said.values() for line in lines]
            return GradusError(
                f"process {left.process} on {left.node} left with exit code {left.code}", output="\n".join(words)
            )
    return None


def _said_by(
    command: Sequence[str], variables: Mapping[str, str], failed: Callable[[], GradusError | None] | None = None
) -> Said:
    """The lines of JSON that a command prints. What a rank calls an error is raised here."""
    with tempfile.TemporaryFile("w+") as errors:
        process = _started(command, variables, subprocess.PIPE, errors)
        assert process.stdout is not None
        elsewhere: list[GradusError] = []
        over = threading.Event()

        def look() -> None:
            while failed is not None and not over.wait(_LOOK_SECONDS):
                if (failure := failed()) is not None:
                    elsewhere.append(failure)
                    _end(process)
                    return

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            for line in process.stdout:
                found = _document(line)
                if found is None:
                    continue
                if "error" in found:
                    raise _problem(found)
                yield found
            process.wait()
        finally:
            over.set()
            _end(process)
            watcher.join()
        if elsewhere:
            raise elsewhere[0]
        if process.returncode:
            errors.seek(0)
            words = errors.read().strip().splitlines()
            raise GradusError(
                f"the ranks left with exit code {process.returncode}", output="\n".join(words[-_LAST_WORDS:])
            )


def _started(
    command: Sequence[str], variables: Mapping[str, str], stdout: int, stderr: IO[str]
) -> subprocess.Popen[str]:
    environment = {**os.environ, **variables}
    ranks = int(variables.get("LOCAL_WORLD_SIZE", "1"))
    for argument in command:
        if argument.startswith("--nproc-per-node="):
            ranks = int(argument.partition("=")[2])
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env=environment,
        preexec_fn=_before_it_starts,
    )


def _before_it_starts() -> None:
    end_with_parent(signal.SIGTERM)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        kill_descendants(process.pid)
        process.kill()
    process.wait()


def _document(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _problem(said: Mapping[str, Any]) -> GradusError:
    error = dict(said["error"])
    kind = InputError if said.get("exit_code") == EXIT_BAD_INPUT else GradusError
    error.pop("kind", None)
    return kind(error.pop("message"), hint=error.pop("hint", None), **error)


def _as_a_task(arguments: Sequence[str]) -> None:
    """On one node of a step: become its torchrun."""
    ranks, address, port, *program = arguments
    nodes, node = int(os.environ["SLURM_STEP_NUM_NODES"]), int(os.environ["SLURM_NODEID"])
    command = torchrun_command(int(ranks), Meeting(int(port), address, nodes, node), program)
    os.execv(command[0], command)


if __name__ == "__main__":
    _as_a_task(sys.argv[1:])
