"""A GPU's part of a trace: what ran on the device, and why it idled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.diagnosis.timeline.columns import COPY, KERNEL, Column, Columns
from gradus.diagnosis.timeline.idle import launch_moments, split_idle
from gradus.diagnosis.timeline.intervals import (
    Intervals,
    clipped,
    complement,
    joined,
    length,
    union,
    without,
)
from gradus.diagnosis.timeline.kernel_kinds import is_matmul, kind_of, uses_tensor_cores
from gradus.diagnosis.timeline.steps import Steps
from gradus.diagnosis.timeline.syncs import RUNTIME_SYNCS, phase_of, waiting_intervals
from gradus.diagnosis.timeline.trace_analysis import SMALL_KERNEL_SECONDS, Collective, KernelTotal

TOP_KERNELS = 15


def analyse_gpu(columns: Columns, steps: Steps) -> dict[str, Any]:
    """The fields of a TraceAnalysis that depend on the device."""
    names, work = columns.names.all, columns.device
    launched = launch_moments(work, columns.runtime)
    start, end = _window(work, launched, steps)
    inside = (work.end > start) & (work.start < end)
    work, launched = work.where(inside), launched[inside]
    talks = np.array([kind_of(name) == "communication" for name in names], dtype=bool)[work.name]
    kernel, copy = work.kind == KERNEL, work.kind == COPY
    talking, computing, copying = kernel & talks, kernel & ~talks, work.kind != KERNEL

    def covered(chosen: NDArray[np.bool_]) -> Intervals:
        return clipped(union(work.start[chosen], work.end[chosen]), start, end)

    compute, communication, copies = covered(computing), covered(talking), covered(copying)
    busy = joined(compute, communication, copies)
    idle = split_idle(
        complement(busy, start, end),
        work,
        launched,
        waiting_intervals(columns),
        _host_busy(columns),
        data_ranges(columns),
    )
    exposed = length(without(communication, compute))
    seconds = work.seconds
    small = kernel & (seconds < SMALL_KERNEL_SECONDS)
    matmuls = [number for number in np.unique(work.name[computing]) if is_matmul(names[number])]
    on_cores = {number: uses_tensor_cores(names[number]) for number in matmuls}
    known = not any(found is None for found in on_cores.values())
    by_name = np.bincount(work.name[computing], weights=seconds[computing], minlength=len(names))
    not_measured = []
    if not known:
        not_measured.append("tensor-core use of some matrix products, whose kernels' names do not tell it")
    gaps = complement(busy, start, end)
    return {
        "span_seconds": end - start,
        "busy_seconds": length(busy),
        "compute_seconds": length(compute),
        "communication_seconds": length(communication),
        "exposed_communication_seconds": exposed,
        "overlap": 1.0 - exposed / length(communication) if len(communication) else None,
        "copy_seconds": length(copies),
        "idle_seconds": end - start - length(busy),
        "launch_starved_seconds": idle.launch_starved,
        "data_wait_seconds": idle.data,
        "sync_blocked_seconds": idle.sync,
        "idle_other_seconds": idle.other,
        "kernels": int(kernel.sum()),
        "small_kernels": int(small.sum()),
        "small_kernel_share": length(covered(small)) / length(busy) if len(busy) else 0.0,
        "matmul_seconds": float(sum(by_name[number] for number in matmuls)),
        "tensor_core_seconds": float(sum(by_name[number] for number in matmuls if on_cores[number])),
        "matmul_off_tensor_cores_seconds": float(
            sum(by_name[number] for number in matmuls if on_cores[number] is False)
        ),
        "top_kernels": _top(names, work, talking, copy),
        "collectives": _collectives(columns, work.where(talking), steps, launched[talking]),
        "median_gap_seconds": float(np.median(gaps[:, 1] - gaps[:, 0])) if len(gaps) else None,
        "not_measured": not_measured,
    }


def data_ranges(columns: Columns) -> Intervals:
    """When the thread that trains waited for its next batch."""
    names, marks = columns.names.all, columns.marks
    data = np.array([phase_of(name) == "data" for name in names], dtype=bool)
    chosen = marks.where(data[marks.name]) if len(marks) else marks
    return union(chosen.start, chosen.end)


def _window(work: Column, launched: NDArray[np.float64], steps: Steps) -> tuple[float, float]:
    """The steps on the device's side of the clock, which runs behind the host's.

    They begin when what was launched before them is done, and end when the last that they have launched is.
    """
    before = work.end[(launched < steps.start) & (work.end > steps.start)]
    mine = (launched >= steps.start) & (launched < steps.end)
    ends = work.end[mine | (np.isnan(launched) & (work.start < steps.end))]
    start = max(steps.start, float(before.max()) if len(before) else steps.start)
    return start, max(steps.end, float(ends.max()) if len(ends) else steps.end)


def _host_busy(columns: Columns) -> Intervals:
    """When the host was in torch or in CUDA, but not waiting there."""
    waits = columns.names.matching(RUNTIME_SYNCS)
    runtime = columns.runtime
    launches = runtime.where(~waits[runtime.name]) if len(runtime) else runtime
    host = columns.host
    return joined(union(host.start, host.end), union(launches.start, launches.end))


def _top(
    names: list[str], work: Column, talking: NDArray[np.bool_], copy: NDArray[np.bool_]
) -> tuple[KernelTotal, ...]:
    seconds = np.bincount(work.name, weights=work.seconds, minlength=len(names))
    counts = np.bincount(work.name, minlength=len(names))
    talks, copies = set(work.name[talking].tolist()), set(work.name[work.kind != KERNEL].tolist())
    return tuple(
        KernelTotal(
            names[number],
            "communication" if number in talks else "copy" if number in copies else "compute",
            int(counts[number]),
            float(seconds[number]),
            uses_tensor_cores(names[number]),
        )
        for number in np.argsort(-seconds, kind="stable")[:TOP_KERNELS].tolist()
        if counts[number]
    )


def _collectives(
    columns: Columns, talking: Column, steps: Steps, launched: NDArray[np.float64]
) -> tuple[Collective, ...]:
    moments = np.where(np.isnan(launched), talking.start, launched)
    numbers = np.maximum(np.searchsorted(steps.starts, moments, side="right") - 1, 0).tolist()
    names, about = columns.names.all, columns.about_collectives
    columns_of = (talking.name, talking.start, talking.seconds, talking.link)
    rows = zip(*(column.tolist() for column in columns_of), numbers, strict=True)
    return tuple(
        Collective(names[name], began, seconds, step, *about.get(link, (None, None)))
        for name, began, seconds, link, step in rows
    )
