"""What tests of the writer share: a small state, disks that fail, and a writer process whose writes are disturbed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradus.checkpoint.store import CheckpointStore
from gradus.checkpoint.writer import Report, Writer

CPU = torch.device("cpu")

# Python runs it at the start of every process; only the writer process is disturbed. It says in its name what happens
# to a write into a file whose path contains `where`.
_DISTURBANCE = """
import errno, os, random, sys, time
if "gradus.checkpoint.writer_process" in sys.orig_argv:
    how, amount, where = os.environ["DISTURBANCE"].split(":", 2)
    dice, count = random.Random(os.environ.get("DICE")), 0

    def disturbed(original):
        def wrapped(descriptor, *arguments):
            global count
            file = os.readlink(f"/proc/self/fd/{descriptor}")
            if file.endswith(where) if how == "stuck" else where in file:
                count += 1
                if how in ("slow", "stuck"):
                    time.sleep(float(amount))
                elif how == "held":
                    while not os.path.exists(amount):
                        time.sleep(0.01)
                elif (how == "first" and count <= int(amount)) or (how == "random" and dice.random() < float(amount)):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(descriptor, *arguments)
        return wrapped

    os.pwrite, os.fsync = disturbed(os.pwrite), disturbed(os.fsync)
"""


def disturb(
    monkeypatch: pytest.MonkeyPatch, folder: Path, how: str, amount: float | Path, where: str = "step-"
) -> None:
    """From now on the writes of a new writer process are `slow`, or the `first` few fail, or some at `random`.

    `stuck`: only those into the very file or folder whose path ends with `where` take so long. `held`: none ends before
    the file `amount` is there.
    """
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_DISTURBANCE)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("DISTURBANCE", f"{how}:{amount}:{where}")


def state(value: float = 1.0, numbers: int = 1000) -> dict[str, Tensor]:
    return {"weight": torch.full((numbers,), value), "count": torch.tensor(int(value)), "empty": torch.empty(0, 3)}


def value_of(folder: Path, step: int) -> float:
    """What `state` was made with, of a checkpoint that is verified to its last byte."""
    weight = CheckpointStore(folder).open(step).tensors()["weight"]
    assert bool((weight == weight[0]).all())
    return float(weight[0])


@contextmanager
def writing(folder: Path, rank: int = 0, ranks: int = 1, **options: Any) -> Iterator[Writer]:
    writer = Writer(folder, rank, ranks, CPU, **options)
    try:
        yield writer
    finally:
        writer.close()


def saved(writer: Writer, step: int, tensors: Mapping[str, Tensor] | None = None, timeout: float = 60) -> list[Report]:
    """Save, wait until it is committed or has failed, and everything that was told."""
    writer.save(step, tensors if tensors is not None else state(float(step)), {"state": {}})
    assert writer.wait("committed", timeout) is not None
    return writer.poll()


def kinds(reports: list[Report]) -> list[str]:
    return [report.kind for report in reports]


def eventually(found: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


def process_of(parent: int) -> int:
    """The writer process of a process, or one of them; 0 if there is none."""
    return next(iter(processes_of(parent)), 0)


def processes_of(parent: int) -> list[int]:
    """The writer processes of a process."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if b"gradus.checkpoint.writer_process" in words and int(status[1]) == parent and status[0] != "Z":
            found.append(int(pid))
    return sorted(found)


@contextmanager
def small_disk(path: Path, megabytes: int = 20) -> Iterator[Path]:
    """A disk of its own at a path."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk")
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
