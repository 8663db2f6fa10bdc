"""torchrun: the command that starts the ranks of one node, and what it says about ranks that died."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def torchrun_command(ranks: int, port: int, module: str, arguments: Sequence[str]) -> list[str]:
    """One node, static rendezvous on loopback, no restarts: a restart is a new launch."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=0"),
        *("--master-addr=127.0.0.1", f"--master-port={port}"),
        *("--module", module, *arguments),
    ]


def rank_environment(ranks: int, cores: int, deterministic: bool) -> dict[str, str]:
    """The variables that ranks must have from their first moment on."""
    variables = dict(os.environ)
    variables["PYTHONUNBUFFERED"] = "1"
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    return {**determinism_variables(deterministic), **variables}


def determinism_variables(deterministic: bool) -> dict[str, str]:
    """What must be set, unless the user has set it, before torch is imported."""
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {}  # cuBLAS is deterministic only with this


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kill_left_over(module: str, arguments: Sequence[str]) -> list[int]:
    """Kill ranks that torchrun left behind: it forgets those that it was just starting when a signal ended it."""
    killed = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # processes come and go, and some are not ours to read
            command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if module in command and command[command.index(module) + 1 :][: len(arguments)] == list(arguments):
                os.kill(int(process.name), signal.SIGKILL)
                killed.append(int(process.name))
    return killed


def port_taken_in_log(text: str) -> bool:
    """Whether torchrun left because its own port is in use, and not because a rank met with such an error."""
    return "EADDRINUSE" in text and death_in_log(text) is None


def death_in_log(text: str) -> dict[str, Any] | None:
    """The first rank that died without a word (killed, out of host memory), from torchrun's own failure table."""
    table = text.rpartition("Root Cause (first observed failure)")[2]
    rank = re.search(r"rank\s*:\s*(\d+)", table)
    code = re.search(r"exitcode\s*:\s*(-?\d+)", table)
    host = re.search(r"host\s*:\s*(\S+)", table)
    if not (rank and code):
        return None
    exit_code = int(code[1])
    hint = None
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        how = f"was killed by {name}"
        if name == "SIGKILL":
            hint = "the kernel does that when host memory runs out (see dmesg): use fewer workers or a smaller batch"
    else:
        how = f"left with exit code {exit_code}"
    return {
        "kind": "rank-died",
        "message": f"rank {rank[1]}{f' on {host[1]}' if host else ''} {how}",
        "hint": hint,
        "rank": int(rank[1]),
        "node": host[1] if host else None,
    }
