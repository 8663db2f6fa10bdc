"""A trace without a GPU: torch's operators on the threads that train are the work, and gloo's calls talk."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.diagnosis.timeline.columns import Column, Columns
from gradus.diagnosis.timeline.gpu_analysis import TOP_KERNELS, data_ranges
from gradus.diagnosis.timeline.intervals import clipped, common, complement, joined, length, union, without
from gradus.diagnosis.timeline.kernel_kinds import HOST_COMMUNICATION
from gradus.diagnosis.timeline.steps import Steps
from gradus.diagnosis.timeline.trace_analysis import SMALL_KERNEL_SECONDS, Collective, KernelTotal

_PRODUCTS = re.compile(
    r"^aten::(?:mm|addmm|bmm|baddbmm|matmul|mkldnn_convolution|convolution|_scaled_dot_product|mkldnn_linear)|::_mm$"
)
_NOT_MEASURED = (
    "launch-starved and sync-blocked time (the trace has no GPU)",
    "tensor-core use (the trace has no GPU)",
)


def analyse_cpu(columns: Columns, steps: Steps) -> dict[str, Any]:
    """The fields of a TraceAnalysis that depend on the device. A batch that this very thread makes is data, too."""
    names = columns.names
    start, end = steps.start, steps.end
    host = _of_training(columns, steps)
    host = host.where((host.end > start) & (host.start < end))
    talks = names.matching(HOST_COMMUNICATION)
    talking = talks[host.name] if len(host) else np.zeros(0, dtype=bool)
    marks = columns.marks
    gloo = marks.where(talks[marks.name] & (marks.end > start) & (marks.start < end)) if len(marks) else marks
    data = clipped(data_ranges(columns), start, end)
    calls = clipped(union(host.start[talking], host.end[talking]), start, end)
    communication = without(joined(clipped(union(gloo.start, gloo.end), start, end), calls), data)
    # An operator that calls a collective is busy talking meanwhile, not computing.
    compute = without(without(clipped(union(host.start, host.end), start, end), calls), data)
    exposed = length(without(communication, compute))
    busy = joined(compute, communication)
    idle = complement(busy, start, end)
    waits = length(common(idle, data))
    own = own_seconds(host)
    leaves = ~talking & ~_in(data, host)
    small = leaves & (host.seconds < SMALL_KERNEL_SECONDS)
    seconds = np.bincount(host.name[leaves], weights=own[leaves], minlength=len(names.all))
    products = names.matching(_PRODUCTS)
    not_measured = list(_NOT_MEASURED)
    if not steps.lane:
        not_measured.append("single steps (the trace has no marks for them)")
    if not len(data) and not any(name.startswith("gradus:") for name in names.all):
        not_measured.append("waiting for data (the trace has no marks for it)")
    return {
        "span_seconds": end - start,
        "busy_seconds": length(busy),
        "compute_seconds": length(compute),
        "communication_seconds": length(communication),
        "exposed_communication_seconds": exposed,
        "overlap": 1.0 - exposed / length(communication) if len(communication) else None,
        "copy_seconds": 0.0,
        "idle_seconds": length(idle),
        "launch_starved_seconds": 0.0,
        "data_wait_seconds": waits,
        "sync_blocked_seconds": 0.0,
        "idle_other_seconds": length(idle) - waits,
        "kernels": int(leaves.sum()),
        "small_kernels": int(small.sum()),
        "small_kernel_share": float(own[small].sum()) / length(busy) if len(busy) else 0.0,
        "matmul_seconds": float(seconds[products].sum()),
        "tensor_core_seconds": None,
        "matmul_off_tensor_cores_seconds": None,
        "top_kernels": _top(names.all, host.name[leaves], own[leaves]),
        "collectives": _collectives(names.all, gloo, steps),
        "median_gap_seconds": None,
        "not_measured": not_measured,
    }


def own_seconds(host: Column) -> NDArray[np.float64]:
    """Of each operator, its time without the operators that it calls: events of a thread are nested."""
    starts, ends, own = host.start.tolist(), host.end.tolist(), host.seconds.tolist()  # faster than arrays, one by one
    for lane in np.unique(host.lane):
        around: list[int] = []
        for index in np.flatnonzero(host.lane == lane).tolist():
            while around and ends[around[-1]] <= starts[index]:
                around.pop()
            if around:
                own[around[-1]] -= ends[index] - starts[index]
            around.append(index)
    found: NDArray[np.float64] = np.maximum(np.array(own), 0.0)
    return found


def _of_training(columns: Columns, steps: Steps) -> Column:
    """Operators of the thread that trains and of those that compute gradients for it."""
    host = columns.host
    if not len(host):
        return host
    backward = np.array([name.startswith("autograd::engine") for name in columns.names.all], dtype=bool)
    lanes = set(host.lane[backward[host.name]].tolist())
    if steps.lane is not None:
        lanes.add(steps.lane)
    if not lanes:
        numbers, counts = np.unique(host.lane, return_counts=True)
        lanes = {int(numbers[counts.argmax()])}
    return host.where(np.isin(host.lane, list(lanes)))


def _in(data: NDArray[np.float64], host: Column) -> NDArray[np.bool_]:
    if not len(data) or not len(host):
        return np.zeros(len(host), dtype=bool)
    at = np.searchsorted(data[:, 0], host.start, side="right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (host.start < data[np.maximum(at, 0), 1])
    return inside


def _top(names: list[str], numbers: NDArray[np.int32], own: NDArray[np.float64]) -> tuple[KernelTotal, ...]:
    seconds = np.bincount(numbers, weights=own, minlength=len(names))
    counts = np.bincount(numbers, minlength=len(names))
    return tuple(
        KernelTotal(names[number], "compute", int(counts[number]), float(seconds[number]))
        for number in np.argsort(-seconds, kind="stable")[:TOP_KERNELS].tolist()
        if counts[number]
    )


def _collectives(names: list[str], gloo: Column, steps: Steps) -> tuple[Collective, ...]:
    order = np.argsort(gloo.start, kind="stable")
    found = []
    for index in order.tolist():
        began = float(gloo.start[index])
        step = max(0, int(np.searchsorted(steps.starts, began, side="right")) - 1)
        found.append(Collective(names[gloo.name[index]], began, float(gloo.end[index]) - began, step))
    return tuple(found)
