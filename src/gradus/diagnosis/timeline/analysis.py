"""Trace analysis: what the steps of a recorded trace spent their time on, by interval arithmetic.

Kernels run side by side, so their durations must not be added: busy time is the length of the union of their
intervals, exposed communication what is left of the communication's union where nothing else runs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from gradus.diagnosis.timeline.columns import KERNEL, Column, Columns, read_columns
from gradus.diagnosis.timeline.cpu_analysis import analyse_cpu
from gradus.diagnosis.timeline.gpu_analysis import analyse_gpu
from gradus.diagnosis.timeline.intervals import clipped, length, union
from gradus.diagnosis.timeline.skew import skew
from gradus.diagnosis.timeline.source_lines import Sources
from gradus.diagnosis.timeline.steps import Steps, steps_of
from gradus.diagnosis.timeline.syncs import phase_of, sync_points
from gradus.diagnosis.timeline.trace_analysis import (
    SMALL_KERNEL_SECONDS,
    Collective,
    KernelTotal,
    Skew,
    SyncPoint,
    TraceAnalysis,
)
from gradus.diagnosis.timeline.trace_file import TraceFile
from gradus.record.format import count_text
from gradus.schema.errors import InputError

__all__ = [
    "SMALL_KERNEL_SECONDS",
    "Collective",
    "KernelTotal",
    "Skew",
    "SyncPoint",
    "TraceAnalysis",
    "analyse",
    "skew",
]

_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)")


def analyse(path: Path) -> TraceAnalysis:
    """Read and analyse a trace of torch.profiler, plain or gzip'ed. Memory is bounded by the number of its events."""
    file = TraceFile(Path(path))
    columns = read_columns(file)
    if not columns.events:
        raise InputError(
            f"{path}: the trace is empty: it has no event with a duration",
            hint="record some steps: gradus train RECIPE --profile steps=5",
            file=str(path),
            found=0,
        )
    about = file.about
    steps = steps_of(columns, _number(_ours(about).get("steps")))
    on_gpu = bool((columns.device.kind == KERNEL).any())
    found = analyse_gpu(columns, steps) if on_gpu else analyse_cpu(columns, steps)
    inside = columns.marks.where((columns.marks.start >= steps.start - 1e-9) & (columns.marks.start < steps.end))
    sources = Sources(_paths(about))
    within = _within(columns, steps)
    syncs = sync_points(within, on_gpu=on_gpu, steps=steps.count, marks=inside, sources=sources)
    not_measured = list(found.pop("not_measured"))
    if not on_gpu and len(columns.runtime):
        not_measured.append("the GPU's kernels: the trace has launches, and none of what they launched")
    if not len(columns.python):
        not_measured.append("lines of code (record them with --profile steps=5,stacks)")
    if file.broken:
        not_measured.append(f"{count_text(file.broken, 'event')} that could not be read")
    if file.truncated:
        not_measured.append("what came after the place at which the file was cut")
    return TraceAnalysis(
        path=str(path),
        rank=_rank(about, Path(path)),
        device="cuda" if on_gpu else "cpu",
        steps=steps.count,
        syncs=tuple(syncs),
        phase_seconds=_phases(columns, inside, steps),
        world_size=_number(_ours(about).get("world_size")) or _number(_distributed(about).get("world_size")),
        device_name=_device_name(about),
        truncated=file.truncated,
        not_measured=tuple(not_measured),
        **found,
    )


def _within(columns: Columns, steps: Steps) -> Columns:
    """What the host did in the analysed steps. Python frames stay whole: those around began before."""

    def inside(column: Column) -> Column:
        return column.where((column.start >= steps.start) & (column.start < steps.end))

    runtime, host, marks = inside(columns.runtime), inside(columns.host), inside(columns.marks)
    return Columns(columns.names, columns.device, runtime, host, marks, columns.python)


def _phases(columns: Columns, marks: Column, steps: Steps) -> dict[str, float]:
    """Seconds of the host in each marked phase."""
    names = columns.names.all
    found: dict[str, float] = {}
    phases = {int(number): phase_of(names[number]) for number in np.unique(marks.name)}
    for phase in sorted({name for name in phases.values() if name is not None}):
        numbers = [number for number, name in phases.items() if name == phase]
        mine = marks.where(np.isin(marks.name, numbers))
        found[phase] = length(clipped(union(mine.start, mine.end), steps.start, steps.end))
    return found


def _distributed(about: dict[str, Any]) -> dict[str, Any]:
    found = about.get("distributedInfo")
    return found if isinstance(found, dict) else {}


def _ours(about: dict[str, Any]) -> dict[str, Any]:
    found = about.get("gradus")
    return found if isinstance(found, dict) else {}


def _paths(about: dict[str, Any]) -> list[str]:
    paths = _ours(about).get("paths")
    return [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else []


def _rank(about: dict[str, Any], path: Path) -> int | None:
    told = _number(_ours(about).get("rank"))
    if told is None:
        told = _number(_distributed(about).get("rank"))
    match = _RANK_IN_NAME.search(path.name)
    return told if told is not None else int(match[1]) if match else None


def _number(found: Any) -> int | None:
    return found if isinstance(found, int) else None


def _device_name(about: dict[str, Any]) -> str | None:
    devices = about.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None
