"""Charts of devices: what GPUs and hosts were at while a run trained."""

from __future__ import annotations

import statistics
from itertools import pairwise

from gradus.diagnosis.report.marks import time_marks
from gradus.record.chart import Chart, Mark, Series
from gradus.record.chart_html import render_chart
from gradus.record.history import ALL, History
from gradus.record.page_html import missing, paragraph

GIB = 2**30
_MOST_LINES = 8  # of more GPUs or nodes the mean over all of them is shown
_GPU = (
    ("utilisation", "GPU utilisation", "% of time with a kernel running", 100.0),
    ("power", "Power", "W", 1.0),
    ("temperature", "Temperature", "°C", 1.0),
    ("clock", "Clock of the multiprocessors", "MHz", 1.0),
    ("memory", "GPU memory in use, by everybody", "GiB", 1 / GIB),
)
_HOST = (
    ("cpu", "CPU utilisation", "% of the cores that the job may use", 100.0),
    ("host memory", "Host memory in use", "GiB", 1 / GIB),
)
_UNITS = (
    (2 * 86400.0, 86400.0, "days"),
    (3 * 3600.0, 3600.0, "hours"),
    (300.0, 60.0, "minutes"),
    (0.0, 1.0, "seconds"),
)


def time_unit(span_seconds: float) -> tuple[float, str]:
    """The unit of an axis so long: its seconds and its name."""
    return next((size, name) for least, size, name in _UNITS if span_seconds >= least)


def devices_html(history: History) -> str:
    if not history.device_samples:
        return missing("Devices were not sampled: the run is of an older version, or its launcher died at once.")
    starts = history.devices.starts
    span = starts[-1] - starts[0] if starts else 0
    seconds, name = time_unit(span)
    axis = f"{name} since the first sample"
    marks = time_marks(history, seconds)
    parts = []
    if not history.has_driver:
        parts.append(missing("GPU curves are unavailable: there is no NVIDIA driver on the nodes of this run."))
    else:
        parts.append(_gpus_text(history))
        parts.append(_charts(history, list(history.gpu_names), _GPU, axis, seconds, marks))
    parts.append(_charts(history, history.nodes, _HOST, axis, seconds, marks))
    return "".join(parts)


def _gpus_text(history: History) -> str:
    names = sorted(set(history.gpu_names.values()))
    texts = [f"{len(history.gpu_names)} × {', '.join(names)}."]
    for reason, count in sorted(history.throttled.items(), key=lambda one: -one[1]):
        share = count / history.gpu_samples
        texts.append(f"Clocks were held down in {share:.1%} of the samples: {reason.replace('_', ' ')}.")
    if not history.throttled:
        texts.append("No clock was held down in any sample.")
    return paragraph(" ".join(texts))


def _charts(
    history: History,
    labels: list[str],
    what: tuple[tuple[str, str, str, float], ...],
    axis: str,
    seconds: float,
    marks: tuple[Mark, ...],
) -> str:
    drawn, lacking = [], []
    for name, title, unit, factor in what:
        together = len(labels) > _MOST_LINES
        keys = [(f"{ALL}/{name}", f"mean of {len(labels)}")] if together else [(f"{one}/{name}", one) for one in labels]
        series = [_series(history, key, label, factor, seconds) for key, label in keys]
        found = tuple(one for one in series if one is not None)
        if not found:
            lacking.append(
                title[0].lower() + title[1:] if not title.isupper() and not title.startswith(("GPU", "CPU")) else title
            )
            continue
        extremes = f"From {history.lowest[name] * factor:.4g} to {history.highest[name] * factor:.4g} over all samples."
        drawn.append(
            render_chart(Chart(title, axis, unit, found, marks=marks, from_zero=name != "temperature", note=extremes))
        )
    missing_text = missing(f"Unavailable, the driver or system does not say: {', '.join(lacking)}.") if lacking else ""
    return (f'<div class="charts">{"".join(drawn)}</div>\n' if drawn else "") + missing_text


def _series(history: History, key: str, label: str, factor: float, seconds: float) -> Series | None:
    """Means over windows. Where nothing was sampled for long, as between attempts, the line is broken."""
    means = history.devices.means(key)
    points = [(start, mean) for start, mean in zip(history.devices.starts, means, strict=True) if mean is not None]
    if not points:
        return None
    steps = [after[0] - before[0] for before, after in pairwise(points)]
    usual = statistics.median(steps) if steps else 0.0
    xs: list[float] = []
    ys: list[float | None] = []
    for (at, mean), step in zip(points, [0.0, *steps], strict=True):
        if usual and step > 10 * usual:
            xs.append((at - step / 2) / seconds)
            ys.append(None)
        xs.append(at / seconds)
        ys.append(mean * factor)
    return Series(label, xs, ys)
