"""torchrun: the command that starts the ranks of one node, and what it says about ranks that died."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.schema.recipe import Recipe

_LOWEST_PORT = 10_000  # below are those of services
_TRIES = 100  # to find a free one

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """Where the nodes of an attempt meet: at a port of the first one. Nobody guesses who that is."""

    port: int
    address: str
    nodes: int = 1
    node: int = 0  # this one


def torchrun_command(ranks: int, meeting: Meeting, program: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The ranks of one node, static rendezvous, no restarts: a restart is a new launch."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={meeting.nodes}", f"--node-rank={meeting.node}", f"--nproc-per-node={ranks}", "--max-restarts=0"),
        *(f"--master-addr={meeting.address}", f"--master-port={meeting.port}"),
        *options,
        *program,
    ]


def rank_environment(ranks: int, cores: int, recipe: Recipe | None) -> dict[str, str]:
    """The variables that ranks must have from their first moment on. A script without a recipe is left to itself."""
    variables = dict(os.environ)
    variables["PYTHONUNBUFFERED"] = "1"
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    return {**(torch_variables(recipe) if recipe else {}), **variables}


def torch_variables(recipe: Recipe) -> dict[str, str]:
    """What must be set, unless the user has set it, before torch is imported."""
    # Blocks of memory that grow and shrink, in place of many of fixed sizes that nothing fits into: on an H200, a GPT-2
    # with a peak of 30.4 GiB ran with 31.6 GiB, and without this ran out of memory with 35.0.
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", *allocator)):  # one of them alone, or torch warns
        allocator = {}
    reproducible = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # cuBLAS is deterministic only with this
    return allocator | (reproducible if recipe.deterministic else {})


def free_port() -> int:
    """A port that is free now, and that the kernel gives to nobody who asks it for any: ranks take it seconds later."""
    for _ in range(_TRIES):
        port = _LOWEST_PORT + secrets.randbelow(_kernels_lowest_port() - _LOWEST_PORT)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _kernels_lowest_port() -> int:
    """From here on, the kernel chooses ports itself."""
    try:
        return max(_LOWEST_PORT + 1, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return 32768  # as Linux has it


@dataclass(frozen=True)
class Death:
    """A rank that ended badly, as torchrun saw it: its exit code, or minus the number of the signal that killed it."""

    rank: int
    node: str | None
    exit_code: int
    at: str = ""  # in text that sorts as time does, to the second

    @property
    def was_killed(self) -> bool:
        """By a signal from outside, which no peer's end explains: neither torchrun's own nor that of an abort."""
        return self.signal is not None and self.signal not in ("SIGTERM", "SIGHUP", "SIGABRT")

    @property
    def signal(self) -> str | None:
        if self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:  # a real-time signal has no name
            return f"signal {-self.exit_code}"

    def document(self) -> dict[str, Any]:
        """The error as far as the exit code tells it."""
        hint = None
        if self.signal == "SIGKILL":
            hint = "the kernel does that when host memory runs out (see dmesg): use fewer workers or a smaller batch"
        how = f"was killed by {self.signal}" if self.signal else f"left with exit code {self.exit_code}"
        return {
            "kind": "rank-died",
            "message": f"rank {self.rank}{f' on {self.node}' if self.node else ''} {how}",
            "hint": hint,
            "rank": self.rank,
            "node": self.node,
        }


def port_taken_in_log(text: str) -> bool:
    """Whether torchrun left because its own port is in use, and not because a rank met with such an error."""
    return "EADDRINUSE" in text and not deaths_in_log(text)


def deaths_in_log(text: str) -> list[Death]:
    """The ranks that had died when torchrun noticed, from its own failure table; the first one comes first."""
    others, found, first = text.rpartition("Root Cause (first observed failure)")
    if not found:
        return []
    others = others.rpartition("Failures:")[2]
    entries = [first, *re.split(r"^\[\d+\]:\s*$", others, flags=re.MULTILINE)[1:]]
    return [death for death in map(_death, entries) if death is not None]


def _death(entry: str) -> Death | None:
    rank = re.search(r"rank\s*:\s*(\d+)", entry)
    code = re.search(r"exitcode\s*:\s*(-?\d+)", entry)
    host = re.search(r"host\s*:\s*(\S+)", entry)
    if not (rank and code):
        return None
    at = re.search(r"time\s*:\s*(\S+)", entry)
    return Death(int(rank[1]), host[1] if host else None, int(code[1]), at[1] if at else "")
