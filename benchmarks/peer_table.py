"""The table of versus_peers.py, from what it wrote down, and the gap between two loss curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_times import MEMORY_BOUND, WORDS

KINDS = ("matrix products", "attention", "convolutions", MEMORY_BOUND, "optimizer", "copies")
assert set(KINDS) == {MEMORY_BOUND, *WORDS}
PEAK_FLOPS = 989e12  # of an H100 or H200 in bf16, dense, as NVIDIA gives it
MEANS_OVER = 20  # losses: single ones jump about
PEERS, OURS = ("raw", "fabric", "accelerate"), ("gradus", "gradus-lean", "gradus-lean-moments", "gradus-loop")
COLUMNS = (*PEERS, *OURS)


def running_mean_gap(reference: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """The largest relative difference of running means at the steps that both have."""
    steps = sorted(reference.keys() & other.keys())
    if not steps:
        return None
    width = min(MEANS_OVER, len(steps))
    windows = [steps[start : start + width] for start in range(len(steps) - width + 1)]
    means = [
        tuple(statistics.fmean(curve[step] for step in window) for curve in (reference, other)) for window in windows
    ]
    return max((abs(b / a - 1) for a, b in means), default=None)


def table(documents: Sequence[Mapping[str, Any]]) -> str:
    """One row for each work, after a line for each call that says where and when."""
    lines = [_told(document) for document in documents]
    works = [work for document in documents for work in document["works"]]
    named = {name for work in works for name in (*work["contestants"], *work["absent"])}
    columns = [name for name in COLUMNS if name in named]
    lines += ["", f"| work | {' | '.join(columns)} | gradus / best peer | peak memory | MFU | loss gap | goal |"]
    lines.append("|" + "---|" * (len(columns) + 6))
    lines += [_row(work, columns) for work in works]
    return "\n".join(lines)


def roofline(documents: Sequence[Mapping[str, Any]]) -> str:
    """Where the milliseconds of a step went, by kind of kernel: a row for each contestant whose kernels were timed."""
    found = [
        (work, name, one)
        for document in documents
        for work in document["works"]
        for name, one in work["contestants"].items()
        if one.get("kernels") and one["figures"]
    ]
    kinds = [kind for kind in KINDS if any(kind in one["kernels"]["by_kind"] for _, _, one in found)]
    lines = [f"| work | contestant | step, ms | {' | '.join(kinds)} | nothing |", "|" + "---|" * (len(kinds) + 4)]
    for work, name, one in found:
        step = work["units_of_a_step"] / statistics.median(one["figures"])
        times = [one["kernels"]["by_kind"].get(kind, 0.0) for kind in kinds]
        cells = [f"{1000 * seconds:.3g}" for seconds in (*times, max(0.0, step - sum(times)))]
        lines.append(f"| {work['title']} | {name} | {1000 * step:.4g} | {' | '.join(cells)} |")
    return "\n".join(lines) if found else ""


def _told(document: Mapping[str, Any]) -> str:
    names = ("torch", "lightning", "accelerate", "transformers")
    packages = ", ".join(f"{name} {document[name]}" for name in names if document[name])
    found = [one for work in document["works"] for one in work["contestants"].values()]
    clocks = {sample["clock_mhz"] for one in found for sample in one["clocks"] if sample["clock_mhz"]}
    at = f", clock {min(clocks)} to {max(clocks)} MHz" if clocks else ""
    where = f"Measured {document['date']} on {document['device']}, {packages}{at}"
    return f"{where}: medians of {document['rounds']} segments in turn ± half of their range."


def _row(work: Mapping[str, Any], columns: Sequence[str]) -> str:
    found = work["contestants"]
    cells = [_figure(work, name) for name in columns]
    medians = {name: statistics.median(one["figures"]) for name, one in found.items() if one["figures"]}
    peers = {name: medians[name] for name in PEERS if name in medians}
    ours = [name for name in OURS if name in medians]
    ratio = memory = mfu = ""
    if ours and peers:
        best = (min if work["less_is_better"] else max)(peers, key=lambda name: peers[name])
        ratio = f"{', '.join(f'{medians[name] / peers[best]:.3f}' for name in ours)} ({best})"
        theirs = found[best]["peak_gib"]
        peaks = [found[name]["peak_gib"] for name in ours]
        if theirs and all(peaks):
            shares = ", ".join(f"{peak / theirs:.2f}" for peak in peaks)
            memory = f"{shares} ({', '.join(f'{peak:.1f}' for peak in peaks)} / {theirs:.1f} GiB)"
    on_gpu = any(one["peak_gib"] for one in found.values())
    if ours and work["flops_of_a_unit"] and on_gpu:
        mfu = ", ".join(f"{medians[name] * work['flops_of_a_unit'] / PEAK_FLOPS:.1%}" for name in ours)
    gaps = [found[name].get("loss_gap") for name in ours]
    told = ", ".join(f"{gap:.2%}" for gap in gaps if gap is not None)
    cells = [f"{work['title']}, {work['unit']}", *cells, ratio, memory, mfu, told, work["goal"]]
    return f"| {' | '.join(cells)} |"


def _figure(work: Mapping[str, Any], name: str) -> str:
    """A contestant's median and half range; measured again, what it was the second time."""
    one = work["contestants"].get(name)
    if one is None:
        return "absent" if name in work["absent"] else ""
    if one["problem"] and not one["figures"]:  # what came after the last segment takes nothing away
        return str(one["problem"]).replace("|", "/")
    if not one["figures"]:
        return ""
    text = f"{_number(statistics.median(one['figures']))} ± {_number((max(one['figures']) - min(one['figures'])) / 2)}"
    again = work["contestants"].get(f"{name} again")
    if again is not None and again["figures"]:
        text += f", again {_number(statistics.median(again['figures']))}"
    return text


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
