"""Charts of training: loss, learning rate, gradients, speed and memory over steps."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.record.chart import Chart, Mark, Series
from gradus.record.chart_html import render_chart
from gradus.record.history import History
from gradus.record.metrics import VALIDATION
from gradus.record.page_html import missing
from gradus.record.thinning import ThinnedSeries

GIB = 2**30
_OWN_CHARTS = frozenset(
    {"loss", "lr", "grad_norm", "step_seconds", "data_seconds", "samples", "tokens", "samples_per_second"}
    | {
        "tokens_per_second",
        "memory_peak_bytes",
        "mfu",
        "loss_scale",
        "epoch",
        "evaluation_seconds",
        "checkpoint_stall_seconds",
    }
    | {"epoch_loss", "epoch_samples_per_second", "epoch_tokens_per_second", "validation_loss"}
    # By kind: shown with all ranks, from timings.
    | {"forward_seconds", "backward_seconds", "exposed_communication_seconds", "optimizer_seconds"}
    | {"host_to_device_seconds", "checkpoint_seconds", "other_seconds"}
)
_MOST_FURTHER = 12
_MOST_RANKS = 8


def series_of(found: ThinnedSeries | None, label: str, factor: float = 1.0, dashed: bool = False) -> Series | None:
    """A line, if anything was written for it. What was not finite is said in the chart's note."""
    if found is None or not (len(found) or found.not_finite):
        return None
    points = found.points
    xs: list[float] = [x for x, _ in points]
    ys: list[float | None] = [y * factor for _, y in points]
    return Series(label, xs, ys, dashed)


def _chart(
    history: History,
    title: str,
    unit: str,
    lines: Sequence[tuple[str, str]],
    marks: tuple[Mark, ...] = (),
    *,
    factor: float = 1.0,
    log_y: bool = False,
    from_zero: bool = False,
    note: str | None = None,
) -> str:
    """Of metrics by (name, label); nothing where none of them was written."""
    found = [
        series
        for name, label in lines
        if (series := series_of(history.metrics.get(name), label, factor, name.startswith(VALIDATION)))
    ]
    if not found:
        return ""
    not_finite = [
        f"{label} was not finite {one.not_finite} times, first at step {one.first_not_finite:.0f}."
        for name, label in lines
        if (one := history.metrics.get(name)) is not None and one.not_finite
    ]
    notes = " ".join([*([note] if note else []), *not_finite]) or None
    return render_chart(
        Chart(title, "step", unit, tuple(found), marks=marks, log_y=log_y, from_zero=from_zero, note=notes)
    )


def training_html(history: History, marks: tuple[Mark, ...]) -> str:
    charts = [
        _wide(_chart(history, "Loss", "", [("loss", "training"), ("validation_loss", "validation")], marks)),
        _chart(history, "Learning rate", "", [("lr", "learning rate")]),
        _chart(
            history,
            "Gradient norm",
            "before clipping",
            [("grad_norm", "gradient norm")],
            log_y=_is_wide(history, "grad_norm"),
        ),
        _chart(history, "Loss scale", "fp16", [("loss_scale", "loss scale")], log_y=True),
    ]
    charts += [
        _chart(
            history, name.removeprefix(VALIDATION).replace("_", " ").capitalize(), "validation", [(name, "validation")]
        )
        for name in sorted(history.metrics)
        if name.startswith(VALIDATION) and name != "validation_loss"
    ]
    further = [
        name for name in history.metrics if name not in _OWN_CHARTS and not name.startswith((VALIDATION, "epoch"))
    ]
    charts += [
        _chart(history, name.replace("_", " ").capitalize(), "", [(name, name.replace("_", " "))])
        for name in further[:_MOST_FURTHER]
    ]
    drawn = "".join(charts)
    if not drawn:
        return missing(
            "No step was logged: the run has not come to its first step, or is of a script with its own log."
        )
    more = len(further) - _MOST_FURTHER
    left = missing(f"{more} further metrics are in metrics.jsonl and not drawn.") if more > 0 else ""
    return f'<div class="charts">{drawn}</div>\n{left}'


def speed_html(history: History, marks: tuple[Mark, ...]) -> str:
    rates = "tokens_per_second" if history.last("tokens_per_second") is not None else "samples_per_second"
    unit = rates.replace("_per_second", "/s")
    drawn = "".join(
        (
            _chart(history, "Throughput", unit, [(rates, unit)], marks, from_zero=True),
            _chart(
                history,
                "Step time",
                "ms",
                [("step_seconds", "step"), ("data_seconds", "of it, waiting for data")],
                factor=1e3,
                from_zero=True,
                note="Without evaluations and checkpoints.",
            ),
            _chart(history, "MFU", "% of peak", [("mfu", "MFU")], factor=100, from_zero=True),
        )
    )
    return f'<div class="charts">{drawn}</div>\n' if drawn else missing("No speed was logged.")


def memory_html(history: History, limit_bytes: float | None = None) -> str:
    """Peaks of ranks over steps; of many ranks, those that need most and least."""
    by_rank = {rank: found["peak"] for rank, found in sorted(history.memory.items()) if "peak" in found}
    if by_rank:
        peaks = {rank: max(y for _, y in found.points) for rank, found in by_rank.items() if len(found)}
        chosen = sorted(peaks, key=lambda rank: -peaks[rank])
        if len(chosen) > _MOST_RANKS:
            chosen = [*chosen[: _MOST_RANKS - 1], chosen[-1]]
        lines = [series_of(by_rank[rank], f"rank {rank}", 1 / GIB) for rank in sorted(chosen)]
        lines += [
            series_of(history.memory[rank]["reserved"], f"rank {rank}, held by the allocator", 1 / GIB, dashed=True)
            for rank in sorted(chosen)[:1]
            if "reserved" in history.memory[rank]
        ]
        few = (
            f"The {len(chosen) - 1} ranks that need most and the one that needs least, of {len(peaks)}."
            if len(peaks) > len(chosen)
            else None
        )
    else:
        lines, few = [series_of(history.metrics.get("memory_peak_bytes"), "rank 0", 1 / GIB)], None
    series = [line for line in lines if line is not None]
    if not series:
        return missing("No memory was recorded.")
    has_gpu = any("reserved" in found for found in history.memory.values())
    what = (
        "The most that tensors took so far."
        if has_gpu
        else "The most that each process took so far, in host memory: there is no GPU."
    )
    of_limit = f" The device has {limit_bytes / GIB:.1f} GiB." if limit_bytes else ""
    note = " ".join([*([few] if few else []), f"{what}{of_limit}"])
    return render_chart(Chart("Peak memory", "step", "GiB", tuple(series), from_zero=True, note=note))


def _is_wide(history: History, name: str) -> bool:
    """Whether values span so much that only a logarithmic axis shows them all."""
    series = history.metrics.get(name)
    positive = [y for _, y in series.points if y > 0] if series is not None else []
    return bool(positive) and max(positive) > 50 * sorted(positive)[len(positive) // 2]


def _wide(html: str) -> str:
    return f'<div class="wide">{html}</div>\n' if html else ""
