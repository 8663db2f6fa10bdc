"""Starting the benchmark of collectives: on this machine, or on the nodes of the allocation that this is in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradus.hardware.detect import detect_machine
from gradus.launcher.slurm.description import rendezvous_port
from gradus.launcher.slurm.script import node_tasks
from gradus.launcher.slurm.step import other_nodes
from gradus.launcher.torchrun import LOOPBACK, Meeting, free_port, torchrun_command
from gradus.schema.errors import GradusError, InputError

_RANK_MODULE = "gradus.bench.collectives_rank"
_LAST_WORDS = 12


@dataclass(frozen=True)
class Asked:
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str


def doubling(smallest: int, largest: int, factor: int = 4) -> tuple[int, ...]:
    """Sizes from the smallest to the largest, each so many times the one before."""
    if smallest > largest:
        raise InputError(
            f"--from: found {smallest}, which is more than --to {largest}",
            field="--from",
            found=smallest,
            allowed=largest,
        )
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def collectives(asked: Asked, nproc: int | None) -> Iterator[dict[str, Any]]:
    """What rank 0 says, line by line: first on what, then the rows."""
    process = subprocess.Popen(
        _command(asked, nproc),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        for line in process.stdout:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found
        words = process.stderr.read().strip().splitlines()
        if process.wait():
            raise GradusError(
                f"the ranks left with exit code {process.returncode}", output="\n".join(words[-_LAST_WORDS:])
            )
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _command(asked: Asked, nproc: int | None) -> list[str]:
    program = ["--module", _RANK_MODULE, json.dumps(asdict(asked))]
    nodes = other_nodes()
    if nodes is None:
        ranks = nproc or len(detect_machine().gpus) or 2
        return torchrun_command(ranks, Meeting(free_port(), LOOPBACK), program)
    ranks = nproc or nodes.gpus_per_node or 1
    port = rendezvous_port(nodes.job_id, os.getpid())
    task = [sys.executable, "-m", "gradus.bench.collectives_start", str(ranks), nodes.address(), str(port), *program]
    return ["srun", "--overlap", *node_tasks(len(nodes.nodes)), *task]


def _as_a_task(arguments: Sequence[str]) -> None:
    """On one node of a step: become its torchrun."""
    ranks, address, port, *program = arguments
    nodes, node = int(os.environ["SLURM_STEP_NUM_NODES"]), int(os.environ["SLURM_NODEID"])
    command = torchrun_command(int(ranks), Meeting(int(port), address, nodes, node), program)
    os.execv(command[0], command)


if __name__ == "__main__":
    _as_a_task(sys.argv[1:])
