"""Stacks: where the threads of a rank are, in words that lead to the line of the user's own that it hangs in."""

from __future__ import annotations

import json
import os
import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import torch.distributed as dist

import gradus
from gradus.faults.watchdog import Told
from gradus.faults.whereabouts import Phase

_COMPILING = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")  # only there while they compile
_DEBUGGING = ("/bdb.py", "/pdb.py", "/pydevd.py", "/pydevd_frame.py")
_WAITING = (  # file and function in which a thread waits for other ranks, or for its device
    ("torch/distributed/distributed_c10d.py", ""),
    ("torch/distributed/_functional_collectives.py", "wait_tensor"),
    ("gradus/faults/waits.py", "wait"),
    ("torch/cuda/streams.py", "synchronize"),
    ("torch/cuda/__init__.py", "synchronize"),
)
_GRADUS = str(Path(gradus.__file__).parent)


def main_frame() -> FrameType | None:
    """Where the main thread is."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def compiles_or_debugs(frame: FrameType | None) -> Phase | None:
    """What nothing else can tell of a thread: that a compiler is at work in it, or a person."""
    for each in _outward(frame):
        name = each.f_code.co_filename
        if name.endswith(_COMPILING):
            return "compiling"
        if name.endswith(_DEBUGGING):
            return "debugging"
    return None


def waits(frame: FrameType | None) -> bool:
    """Whether the innermost frames are those of a wait for other ranks, or for the device."""
    for depth, each in enumerate(_outward(frame)):
        name, function = each.f_code.co_filename, each.f_code.co_name
        if any(name.endswith(file) and wanted in ("", function) for file, wanted in _WAITING):
            return True
        if depth >= 4 or _is_users(name):  # a wait that user code was called from is none
            return False
    return False


def place_of(frame: FrameType | None) -> str | None:
    """The innermost line of the user's own code; without any, that of ours; without that, of anything."""
    frames = list(_outward(frame))
    if not frames:
        return None
    users = [each for each in frames if _is_users(each.f_code.co_filename)]
    ours = [
        each
        for each in frames
        if each.f_code.co_filename.startswith(_GRADUS) and "/faults/" not in each.f_code.co_filename
    ]
    found = (users or ours or frames)[0]
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}"


def python_stacks() -> str:
    """The stacks of all threads of this process, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames, main = sys._current_frames(), threading.main_thread().ident
    return "\n".join(
        f"thread {names.get(ident, ident)} (innermost call last):\n{''.join(traceback.format_stack(frames[ident]))}"
        for ident in sorted(frames, key=lambda each: each != main)
    )


def collectives_of_gpu() -> tuple[bytes, int | None] | None:
    """NCCL's flight recorder as JSON, and how many collectives were given to this GPU; None where there is none."""
    dump = getattr(dist.distributed_c10d, "_dump_nccl_trace_json", None)  # in builds with CUDA
    if dump is None or not dist.is_initialized():
        return None
    try:
        text = bytes(dump(includeCollectives=True, onlyActive=False))
    except (RuntimeError, TypeError):
        return None
    return text, _collectives(text)


def _collectives(text: bytes) -> int | None:
    try:
        groups = json.loads(text).get("pg_status", {}).values()
        counts = [int(group["last_enqueued_collective"]) for group in groups if "last_enqueued_collective" in group]
    except (ValueError, AttributeError, TypeError):
        return None
    return sum(counts) if counts else None


def place_in(text: str) -> str | None:
    """The innermost line of user code in what faulthandler wrote, whose innermost calls come first."""
    for line in text.splitlines():
        found = line.strip().removeprefix("File ")
        if found.startswith('"') and _is_users(found[1:].partition('"')[0]):
            name, _, rest = found[1:].partition('", line ')
            return f"{name}:{rest}"
    return None


def told_here(rank: int) -> Told:
    """What this rank says of itself."""
    frame = main_frame()
    gpu = collectives_of_gpu()
    return Told(rank, place_of(frame), None, gpu[1] if gpu else None, waits(frame))


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _is_users(file: str) -> bool:
    """Whether a file is neither ours, nor Python's, nor of an installed package."""
    if file.startswith(("<", _GRADUS)):
        return False
    return not any(file.startswith(folder) for folder in _installed())


@cache
def _installed() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {sysconfig.get_paths()[name] for name in names} | {str(Path(os.__file__).parent)}
    return tuple(f"{folder}{os.sep}" for folder in {*found, *site.getsitepackages()})
