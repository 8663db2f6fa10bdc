"""The page of a comparison: runs beside their baseline, their curves in the same charts."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.diagnosis.report.comparison import Compared, Comparison
from gradus.diagnosis.report.device_charts import time_unit
from gradus.diagnosis.report.training_charts import GIB, series_of
from gradus.diagnosis.scaling_law import Refused, ScalingLaw
from gradus.diagnosis.wording import words
from gradus.record.amdahl import Amdahl
from gradus.record.chart import Bars, Chart, Series
from gradus.record.chart_html import render_chart
from gradus.record.format import bytes_text, number_text, rate_text
from gradus.record.page_html import Fact, Head, Section, missing, page, paragraph, table_html
from gradus.schema.breakdown import KINDS

_LONGEST_VALUE = 60


def comparison_page(found: Comparison) -> str:
    sections = [
        Section("runs", "Runs", _table(found)),
        Section("curves", "Curves", _curves(found)),
        Section("scaling", "More GPUs", _scaling(found)),
        Section("time", "Where the time goes", _kinds(found)),
        Section("law", "Scaling law", law_html(found.law)),
        Section("differences", "What differs", _differences(found)),
    ]
    return page(head_of_comparison(found), sections)


def head_of_comparison(found: Comparison) -> Head:
    others = ", ".join(one.label for one in found.runs[1:])
    facts = []
    if found.rate:
        best = max(zip(found.speed_ups(), found.runs, strict=True), key=lambda one: one[0][0] or 0.0)
        facts.append(Fact("fastest", best[1].label, f"{best[0][0]:.2f} × {found.baseline.label}"))
    losses = [(one.final_loss, one.label) for one in found.runs if one.final_loss is not None]
    if losses:
        loss, label = min(losses)
        facts.append(Fact("lowest loss", number_text(loss), label))
    if isinstance(found.amdahl, Amdahl):
        facts.append(Fact("Amdahl fraction", f"{found.amdahl.fraction:.3f}", found.amdahl.basis))
    return Head(
        f"{found.baseline.label} against {others}",
        f"{len(found.runs)} runs; the baseline is {found.baseline.label}",
        facts=tuple(facts),
    )


def _table(found: Comparison) -> str:
    rows = []
    for one, (times, share) in zip(found.runs, found.speed_ups(), strict=True):
        measured = one.measured(found.rate) if found.rate else None
        spread = f" ± {1.96 * measured.error / measured.rate:.1%}" if measured and measured.error is not None else ""
        energy = one.history.energy().per(one.history.last("samples"))
        rows.append(
            (
                one.label,
                one.evidence.state,
                one.devices,
                f"{one.history.last_step:,}",
                _number(one.history.last("loss")),
                _number(one.history.last("validation_loss")),
                f"{rate_text(measured.rate, found.unit)}{spread}" if measured else None,
                f"{times:.2f} ×" if times is not None else None,
                f"{share:.1%}" if share is not None else None,
                _memory(one),
                f"{number_text(energy)} J" if energy is not None else "unavailable",
            )
        )
    header = (
        "run",
        "state",
        "GPUs" if all(one.history.gpu_names for one in found.runs) else "ranks",
        "steps",
        "loss",
        "validation loss",
        "speed",
        "speed-up",
        "efficiency",
        "peak memory",
        "energy a sample",
    )
    doubts = "".join(paragraph(text) for text in found.doubts())
    note = paragraph(
        f"Speed-up is against {found.baseline.label}; efficiency is that speed-up for each GPU or rank. Speeds are "
        "medians of what was logged, without the first steps, with a 95 % interval from its scatter."
    )
    return table_html(header, rows, text_columns=2) + note + doubts


def _number(value: float | None) -> str | None:
    return number_text(value) if value is not None else None


def _memory(one: Compared) -> str | None:
    peaks = [y for found in one.history.memory.values() if "peak" in found for _, y in found["peak"].points]
    series = one.history.metrics.get("memory_peak_bytes")
    peaks = peaks or ([y for _, y in series.points] if series is not None else [])
    return bytes_text(max(peaks)) if peaks else None


def _curves(found: Comparison) -> str:
    wanted = [
        ("loss", "Training loss", "", 1.0, False),
        ("validation_loss", "Validation loss", "", 1.0, False),
        (found.rate or "samples_per_second", "Throughput", f"{found.unit}/s", 1.0, True),
        ("lr", "Learning rate", "", 1.0, False),
        ("grad_norm", "Gradient norm", "", 1.0, False),
        ("memory_peak_bytes", "Peak memory of rank 0", "GiB", 1 / GIB, True),
    ]
    drawn = []
    for name, title, unit, factor, from_zero in wanted:
        lines = [series_of(one.history.metrics.get(name), one.label, factor) for one in found.runs]
        series = tuple(line for line in lines if line is not None)
        if series:
            drawn.append(render_chart(Chart(title, "step", unit, series, from_zero=from_zero)))
    by_time = _loss_over_time(found.runs)
    if by_time is not None:
        drawn.insert(1, render_chart(by_time))
    return f'<div class="charts">{"".join(drawn)}</div>\n' if drawn else missing("No run has logged a step.")


def _loss_over_time(runs: Sequence[Compared]) -> Chart | None:
    """What counts in the end: the loss after so many hours. From the rate, so without waits and evaluations."""
    series = []
    for one in runs:
        losses, seconds = one.history.metrics.get("loss"), one.history.rates["step_seconds"].median
        if losses is None or not len(losses) or not seconds:
            return None
        points = losses.points
        series.append((one.label, [x * seconds for x, _ in points], [y for _, y in points]))
    size, unit = time_unit(max(xs[-1] for _, xs, _ in series))
    lines = tuple(Series(label, [x / size for x in xs], ys) for label, xs, ys in series)
    return Chart("Training loss over time", f"{unit} of training", "", lines, note="Steps × the median step time.")


def _scaling(found: Comparison) -> str:
    sizes = {one.devices for one in found.runs}
    if found.rate is None or len(sizes) < 2:
        assert isinstance(found.amdahl, Refused)
        return missing(_no_fraction(found.amdahl))
    base = found.baseline.devices
    points = sorted(
        (one.devices, times) for one, (times, _) in zip(found.runs, found.speed_ups(), strict=True) if times is not None
    )
    return scaling_html(points, found.amdahl, base, f"against {found.baseline.label}")


def scaling_html(points: Sequence[tuple[int, float]], law: Amdahl | Refused, base: int, against: str) -> str:
    """Speed-ups over numbers of GPUs, with the ideal and, where there is one, the law."""
    xs = [float(devices) for devices, _ in points]
    wide = sorted({*xs, *(2.0**power for power in range(12) if min(xs) <= 2**power <= 4 * max(xs))})
    ideal = Series("ideal", wide, [x / base for x in wide], dashed=True)
    by_law = (
        (Series("Amdahl's law", wide, [law.speed_up(x) / law.speed_up(base) for x in wide], dashed=True),)
        if isinstance(law, Amdahl)
        else ()
    )
    chart = Chart(
        "Speed-up",
        "GPUs or ranks",
        against,
        (Series("measured", xs, [times for _, times in points]), *by_law, ideal),
        log_x=True,
        log_y=True,
        x_is_log_2=True,
        points=True,
    )
    said = _no_fraction(law) if isinstance(law, Refused) else _fraction(law)
    return paragraph(said) + render_chart(chart)


def _fraction(law: Amdahl) -> str:
    most = f"more than {law.limit:.3g} times as fast as one" if law.limit is not None else "too many"
    said = f"Amdahl fraction {law.text()}: so much of a step is split over the GPUs or ranks."
    return f"{said} No number of them would be {most}. {law.basis[0].upper()}{law.basis[1:]}."


def _no_fraction(refused: Refused) -> str:
    return f"No Amdahl fraction: {refused.reason}."


def _kinds(found: Comparison) -> str:
    rows = []
    for one in found.runs:
        if one.history.kinds:
            windows = one.history.kinds[max(one.history.kinds)]
            rows.append((one.label, tuple((words(kind), value) for kind in KINDS if (value := windows.mean(kind)))))
    if not rows:
        return missing("No run has timings: they are of an older version, or have made no step.")
    lacking = [one.label for one in found.runs if not one.history.kinds]
    note = f"Without {', '.join(lacking)}: no timings." if lacking else None
    return render_chart(Bars("Mean step by kind, over ranks", "s", tuple(rows), note=note))


def law_html(law: ScalingLaw | Refused) -> str:
    if isinstance(law, Refused):
        return missing(f"No scaling law: {law.reason}.")
    sizes = [size for size, _ in law.points]
    grid = [sizes[0] * (2 * sizes[-1] / sizes[0]) ** (at / 60) for at in range(61)]
    chart = Chart(
        "Loss and size",
        law.over,
        "final loss",
        (
            Series("runs", sizes, [loss for _, loss in law.points]),
            Series("fitted law", grid, [law.loss(size) for size in grid], dashed=True),
        ),
        log_x=True,
        points=False,
        note=f"Root mean square distance from the law: {law.residual:.3g}. Beyond the largest size it is a guess.",
    )
    return paragraph(f"{law.text()}.") + render_chart(chart)


def _differences(found: Comparison) -> str:
    if not found.differences:
        return paragraph("Nothing: recipes, plans, clusters and software are the same.")
    rows = [(key, *(_short(value) for value in values)) for key, values in found.differences.items()]
    return table_html(("key", *(one.label for one in found.runs)), rows, text_columns=1 + len(found.runs))


def _short(value: object) -> str | None:
    if value is None:
        return None
    text = number_text(value) if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
