"""Shown: a plan and what is predicted of it, in the words and bars that people see in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradus.planner.budget import planned_interval, stopped_seconds
from gradus.planner.defaults import Choice
from gradus.record.format import count_text, duration_text, rate_text
from gradus.schema.plan import Plan
from gradus.schema.prediction import BudgetPrediction, MemoryPrediction, Prediction, StepPrediction

# Short headings of the ranked plans, the ones that a narrow place can do without last.
COLUMNS = ("plan", "memory", "step", "zero", "micro-batch", "recompute", "rate", "MFU", "run", "cost")
GIB = 2**30
WORTH_TELLING = 0.02  # of the time
# Of kinds whose names are not what people would say.
MEMORY_WORDS = {
    "optimizer": "optimizer state",
    "logits": "logits and loss",
    "device_context": "device context",
}
STEP_WORDS = {
    "exposed_communication": "communication",
    "bubble": "pipeline bubble",
    "data": "waiting for data",
}


@dataclass(frozen=True)
class Bar:
    """One kind in a waterfall: it begins where the one before it ends, as shares of the whole width."""

    kind: str
    start: float
    end: float
    text: str
    share: float = 0.0  # of the sum


@dataclass(frozen=True)
class Waterfall:
    """Kinds that add up. `limit` is where on the width the device is full; None where that is not known."""

    bars: tuple[Bar, ...]
    total: Bar
    limit: float | None = None
    hidden: Bar | None = None  # goes on at the same time and adds nothing


def plan_words(plan: Plan) -> str:
    """What sets a plan apart from others: how it is split, and what is unusual about it."""
    words = [str(plan.mesh)]
    if plan.mesh.pipeline > 1:
        words.append(plan.pipeline_schedule + (f" ×{plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""))
    words += ["offload"] if plan.offload != "none" else []
    words += ["activations offloaded"] if plan.activation_offload else []
    return ", ".join(words)


def cells(choice: Choice) -> dict[str, str]:
    """A ranked plan as one row; what is not known is empty."""
    plan, found = choice.plan, choice.prediction
    row = dict.fromkeys(COLUMNS, "")
    row |= {
        "plan": plan_words(plan),
        "zero": str(plan.zero),
        "micro-batch": f"{plan.micro_batch} × {plan.accumulate}",
        "recompute": recompute_words(plan),
    }
    if found is None:
        return row
    row["memory"] = memory_words(found)
    if found.step is not None:
        row["step"] = seconds_text(found.step.total)
    row["rate"] = throughput_words(found)
    row["MFU"] = f"{found.mfu:.1%}" if found.mfu is not None else ""
    if found.budget is not None:
        row["run"] = long_text(_wall_seconds(found.budget))
        row["cost"] = _amount(found.budget.cost) if found.budget.cost is not None else ""
    return row


def recompute_words(plan: Plan) -> str:
    if plan.recompute_blocks is None:
        return plan.recompute
    return f"{plan.recompute}, {count_text(plan.recompute_blocks, 'block')}"


def numbers(choice: Choice) -> dict[str, float | str | None]:
    """What the columns are sorted by."""
    plan, found = choice.plan, choice.prediction
    budget = found.budget if found else None
    return {
        "plan": plan_words(plan),
        "zero": plan.zero,
        "micro-batch": plan.micro_batch,
        "recompute": plan.recompute,
        "memory": found.memory.peak if found else None,
        "step": found.step.total if found and found.step else None,
        "rate": (found.tokens_per_second or found.samples_per_second) if found else None,
        "MFU": found.mfu if found else None,
        "run": _wall_seconds(budget) if budget else None,
        "cost": budget.cost if budget else None,
    }


def memory_words(found: Prediction) -> str:
    """`61.2 of 80 GiB, fits`."""
    if found.limit_bytes is None:
        return gib_text(found.memory.peak)
    return f"{gib_text(found.memory.peak).removesuffix(' GiB')} of {gib_text(found.limit_bytes)}, {found.verdict}"


def throughput_words(found: Prediction) -> str:
    if found.tokens_per_second is not None:
        return rate_text(found.tokens_per_second, "tok")
    return rate_text(found.samples_per_second, "samples") if found.samples_per_second is not None else ""


def memory_waterfall(found: Prediction) -> Waterfall:
    kinds = {MEMORY_WORDS.get(n, n): float(getattr(found.memory, n)) for n in MemoryPrediction.model_fields}
    peak = float(found.memory.peak)
    width = max(peak, float(found.limit_bytes or 0)) or 1.0
    limit = found.limit_bytes / width if found.limit_bytes else None
    return _waterfall(kinds, width, gib_text, "peak", memory_words(found), limit)


def step_waterfall(step: StepPrediction) -> Waterfall:
    fields = [name for name in StepPrediction.model_fields if name != "overlapped_communication"]
    kinds = {STEP_WORDS.get(name, name): getattr(step, name) for name in fields}
    width = max(step.total, step.overlapped_communication) or 1.0
    made = _waterfall(kinds, width, seconds_text, "step", seconds_text(step.total), None)
    if not step.overlapped_communication:
        return made
    text = f"{seconds_text(step.overlapped_communication)}, at the same time"
    hidden = Bar("hidden communication", 0.0, step.overlapped_communication / width, text)
    return Waterfall(made.bars, made.total, None, hidden)


def _waterfall(
    kinds: Mapping[str, float],
    width: float,
    text: Callable[[float], str],
    title: str,
    total_text: str,
    limit: float | None,
) -> Waterfall:
    total = sum(kinds.values())
    bars, reached = [], 0.0
    for name, amount in kinds.items():
        if amount > 0:
            bars.append(Bar(name, reached / width, (reached + amount) / width, text(amount), amount / total))
            reached += amount
    return Waterfall(tuple(bars), Bar(title, 0.0, total / width, total_text, 1.0), limit)


def memory_title(found: Prediction) -> str:
    """What the bars of memory are of."""
    margin = f"±{found.memory_error:.0%}"
    room = ""
    if found.limit_bytes is not None:
        left = found.limit_bytes - found.memory.peak
        room = f", {gib_text(abs(left))} {'left' if left >= 0 else 'too much'}"
    where = f"; peak in: {found.peak_at}" if found.peak_at else ""
    return f"Memory of the rank that needs most: {memory_words(found)} ({margin}{room}){where}"


def step_title(found: Prediction) -> str:
    assert found.step is not None
    margin = f" ±{found.step_error:.0%}" if found.step_error is not None else ""
    words = [f"Time of a step: {seconds_text(found.step.total)}{margin}"]
    if rate := throughput_words(found):
        words.append(rate)
    if found.mfu is not None and found.peak_flops is not None:
        words.append(f"MFU {found.mfu:.1%} of {found.peak_flops / 1e12:,.0f} TFLOP/s")
        if found.hfu is not None and found.hfu > found.mfu * 1.001:
            words.append(f"HFU {found.hfu:.1%}")
    return " · ".join(words)


def budget_lines(found: BudgetPrediction, plan: Plan) -> list[str]:
    """The whole run in a few lines."""
    lines = [f"{found.steps:,} step{'' if found.steps == 1 else 's'} in {long_text(found.seconds)} of training"]
    if found.goodput == 0:
        lines.append("it never ends: nodes fail faster than a checkpoint is written and a restart is done")
    elif found.goodput is not None and found.seconds_with_failures is not None:
        lines.append(
            f"with checkpoints and failures {long_text(found.seconds_with_failures)}: goodput {found.goodput:.1%}"
        )
    lines += _checkpoint_lines(found, plan)
    if found.gpu_hours and found.goodput != 0:
        spent = [f"{_amount(found.gpu_hours)} GPU-hours"]
        if found.energy_kwh is not None:
            mega = found.energy_kwh >= 10_000
            spent.append(f"{_amount(found.energy_kwh / 1000)} MWh" if mega else f"{_amount(found.energy_kwh)} kWh")
        if found.cost is not None:
            spent.append(f"cost {_amount(found.cost)}")
        lines.append(", ".join(spent))
    return lines


def _checkpoint_lines(found: BudgetPrediction, plan: Plan) -> list[str]:
    stall, writing, best = found.checkpoint_stall_seconds, found.checkpoint_seconds, found.checkpoint_every_seconds
    if stall is None or writing is None:
        return []
    line = f"a checkpoint stops training for {long_text(stall)} and is written {long_text(writing)} later"
    if best is not None and plan.checkpoint_every != "auto":
        line += ", best once, at the end" if best >= found.seconds else f", best every {long_text(best)}"
    lines = [line]
    if plan.checkpoint_every == "auto":
        expected = f"; expected every {long_text(best)}" if best is not None and best < found.seconds else ""
        lines.append(f"checkpoint_every auto: the run decides how often, from the stall that it measures{expected}")
    every = planned_interval(plan, found.seconds / found.steps, best)
    if every is None or every >= found.seconds or plan.checkpoint_every == "auto":
        return lines
    stopped = stopped_seconds(every, stall, writing)
    said = f"every {long_text(every)}, as checkpoint_every says,"
    share = stopped / (stopped + every)
    if every < writing:
        lines.append(f"{said} is more often than they can be written: training waits {share:.0%} of the time")
    elif share > WORTH_TELLING:
        lines.append(f"{said} they take {share:.0%} of the time")
    return lines


def refused_lines(refused: Sequence[Mapping[str, object]]) -> list[str]:
    return [f"{entry['plan']}: {entry['reason']}" for entry in refused]


def gib_text(count: float) -> str:
    """Memory: `61.2 GiB`, `0.44 GiB`. Three digits, of which at most two are decimals: less makes no difference."""
    gib = count / GIB
    if 0 < gib < 0.005:
        return "<0.01 GiB"
    decimals = 2 if gib < 9.995 else 1 if gib < 99.95 else 0
    return f"{gib:,.{decimals}f} GiB"


def seconds_text(seconds: float) -> str:
    """A step: `812 µs`, `41.3 ms`, `2.35 s`; minutes from there on."""
    if seconds >= 120:
        return long_text(seconds)
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * 0.9995:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


def long_text(seconds: float) -> str:
    """A run: `0.3 s`, `2:05 min`, `5:12:00 h`, `33.9 days`."""
    if seconds == float("inf"):
        return "for ever"
    if seconds < 60:
        return seconds_text(seconds)
    if seconds >= 3 * 86400:
        return f"{seconds / 86400:,.3g} days" if seconds < 1000 * 86400 else f"{seconds / 86400:,.0f} days"
    return duration_text(seconds) + (" h" if seconds >= 3600 and seconds < 86400 else " min" if seconds < 3600 else "")


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"


def _wall_seconds(budget: BudgetPrediction) -> float:
    return budget.seconds_with_failures if budget.seconds_with_failures is not None else budget.seconds
