"""Memory snapshots: what is where in a GPU's memory, in a file for torch's own viewer (pytorch.org/memory_viz).

On request with the history of a few steps, and when memory runs out as it was then. They are written and never read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from gradus.record.directory import RunDirectory

_MOST_ENTRIES = 200_000  # allocations whose origin is kept: some 100 MB of file


def begin_history(device: torch.device) -> None:
    """From here on, each allocation is kept with the lines of code that made it."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ENTRIES)


def write_snapshot(traces: Path, attempt: int, rank: int, device: torch.device) -> dict[str, Any]:
    """Write it and end the history. Returns fields of an event: where it is, or why there is none."""
    if device.type != "cuda":
        return {"memory": "unavailable: snapshots are of a GPU's memory, and this rank is on a CPU"}
    path = snapshot_path(traces, attempt, rank)
    try:
        _dump(path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return {"memory": str(path)}


def snapshot_at_out_of_memory(run: RunDirectory, attempt: int, rank: int, device: torch.device) -> Path | None:
    """What holds the memory now. Nothing about it may stand in the way of the error that is being told."""
    if device.type != "cuda":
        return None
    path = snapshot_path(run.path / "traces", attempt, rank, "out-of-memory")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _dump(path)
    except Exception:
        return None
    return path


def snapshot_path(traces: Path, attempt: int, rank: int, what: str = "memory") -> Path:
    return traces / f"attempt-{attempt}-rank-{rank}-{what}.pickle"


def _dump(path: Path) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        torch.cuda.memory._dump_snapshot(str(part))  # type: ignore[no-untyped-call]
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
