"""Charts of time: where steps spend it, over the run, in all, and rank by rank."""

from __future__ import annotations

import statistics

from gradus.diagnosis.wording import words
from gradus.record.chart import Bars, Chart, Heat, Mark, Series
from gradus.record.chart_html import render_chart
from gradus.record.history import History
from gradus.record.page_html import missing, paragraph
from gradus.schema.breakdown import KINDS

_OLDER = "it is of an older version, of a script that is not ours, or died before its first log line"
_MOST_BARS = 16
_MOST_STRIPS = 48
# The first steps compile, start workers and fill caches.
_WARM_UP_WINDOWS = 1


def kinds_html(history: History, marks: tuple[Mark, ...]) -> str:
    xs, kinds = history.kept_kinds()
    if not xs:
        return missing(f"Time by kind was not measured: the run has no timings ({_OLDER}).")
    present = [kind for kind in KINDS if any(kinds.get(kind, ()))]
    over_time = Chart(
        "Time by kind over the run",
        "step",
        "ms a step, mean over ranks",
        tuple(Series(words(kind), xs, [value * 1e3 for value in kinds[kind]]) for kind in present),
        marks=tuple(mark for mark in marks if mark.kind != "checkpoint"),
        stacked=True,
    )
    attempt = max(history.kinds)
    windows = history.kinds[attempt]
    total = tuple((words(kind), value) for kind in present if (value := windows.mean(kind)) is not None)
    rows = [("all ranks", total)]
    ranks = history.of_rank.get(attempt, {})
    if 1 < len(ranks) <= _MOST_BARS:
        rows += [
            (f"rank {rank}", tuple((words(k), value) for k in present if (value := of_rank.mean(k)) is not None))
            for rank, of_rank in sorted(ranks.items())
        ]
    many = (
        f" The ranks one by one are left out: there are {len(history.rank_nodes)}." if len(ranks) > _MOST_BARS else ""
    )
    of_attempt = f" of attempt {attempt}" if len(history.kinds) > 1 else ""
    in_all = Bars(
        "Mean step by kind",
        "s",
        tuple(rows),
        note=f"All steps{of_attempt}, the first ones included. What the device does while the host waits for something "
        f"else counts once.{many}",
    )
    shares = sorted(total, key=lambda one: -one[1])[:3]
    whole = sum(value for _, value in total) or 1.0
    said = ", ".join(f"{kind} {value / whole:.0%}" for kind, value in shares)
    early = (
        missing(f"Attempts {', '.join(map(str, lacking))} have no timings.")
        if (lacking := _without_timings(history))
        else ""
    )
    return (
        paragraph(f"Of a step's time: {said}.")
        + f'<div class="charts"><div class="wide">{_drawn_over_time(over_time, xs)}</div>'
        + f'<div class="wide">{render_chart(in_all)}</div></div>\n{early}'
    )


def _drawn_over_time(chart: Chart, xs: list[float]) -> str:
    """An area needs two places on the axis; of one window alone, the bars say all."""
    return render_chart(chart) if len(xs) > 1 else ""


def _without_timings(history: History) -> list[int]:
    return [attempt for attempt, _ in history.attempts_of_steps if attempt not in history.kinds]


def ranks_html(history: History) -> str:
    """Who is slow: a rank's own time, without its waits for others."""
    if not history.own:
        return missing(f"Own time of ranks was not measured ({_OLDER}).")
    attempt = max(history.own)
    windows = history.own[attempt]
    ranks = sorted(windows.names, key=int)
    if len(ranks) < 2:
        return missing("One rank only: there is nobody to be slower than.")
    starts = windows.starts
    begin = _WARM_UP_WINDOWS if len(starts) > 2 * _WARM_UP_WINDOWS else 0
    means: dict[str, float] = {}
    for rank in ranks:
        values = [value for value in windows.means(rank)[begin:] if value is not None]
        if values:
            means[rank] = sum(values) / len(values)
    middle = statistics.median(means.values())
    slowest = max(means, key=lambda rank: means[rank])
    shown = ranks
    left_out = ""
    if len(ranks) > _MOST_STRIPS:
        by_time = sorted(means, key=lambda rank: -means[rank])
        shown = sorted(by_time[: _MOST_STRIPS // 2] + by_time[-_MOST_STRIPS // 2 :], key=int)
        left_out = f" Of {len(ranks)} ranks, the {_MOST_STRIPS // 2} slowest and the {_MOST_STRIPS // 2} fastest."
    rows = tuple((f"rank {rank}", tuple(windows.means(rank)[begin:])) for rank in shown)
    of_attempt = f" of attempt {attempt}" if len(history.own) > 1 else ""
    ratio = means[slowest] / middle if middle else 1.0
    node = history.rank_nodes.get(int(slowest))
    where = f" on {node}" if node else ""
    said = (
        f"Rank {slowest}{where} is the slowest: {means[slowest] * 1e3:.3g} ms of its own a step, "
        f"{ratio:.2f} times the median of {middle * 1e3:.3g} ms. Others wait for the slowest in every step."
    )
    heat = Heat(
        "Own time by rank",
        "step",
        "s",
        starts[begin:],
        rows,
        note=f"Seconds of work in a step{of_attempt}, waiting for other ranks taken off; darker is slower.{left_out}",
    )
    return paragraph(said) + render_chart(heat)
