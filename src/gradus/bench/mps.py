"""NVIDIA's Multi-Process Service: lets kernels of several processes run on a GPU at once, not in turns.

Ours has a folder of its own, so that it meets no other on the machine, and ends with the benchmark.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
_PATIENCE_SECONDS = 20.0


@contextlib.contextmanager
def mps() -> Iterator[Mapping[str, str] | str]:
    """The variables by which a process uses it; or, in words, why there is none."""
    command = shutil.which(CONTROL)
    if command is None:
        yield f"{CONTROL} is not there"
        return
    # Under /tmp, since the name of a socket may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="gradus-mps-", dir="/tmp") as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in variables.values():
            Path(path).mkdir()
        problem = _said(command, ["-d"], None, variables)
        if problem is not None:
            yield f"{CONTROL} does not start: {problem}"
            return
        try:
            yield variables
        finally:
            _said(command, [], "quit\n", variables)


def _said(command: str, arguments: list[str], words: str | None, variables: Mapping[str, str]) -> str | None:
    """What it complains about, if it does."""
    # The daemon keeps what it was given as its output: a pipe would be waited for until it ends.
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                [command, *arguments],
                input=words,
                stdin=subprocess.DEVNULL if words is None else None,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **variables},
                timeout=_PATIENCE_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        output.seek(0)
        said = output.read().strip()
    return said.splitlines()[-1] if done.returncode and said else (None if not done.returncode else "no reason given")
