"""Head: a run in a dozen numbers, each with where it comes from, or that it is unavailable and why."""

from __future__ import annotations

from gradus.diagnosis.evidence import Evidence
from gradus.record.format import bytes_text, count_text, duration_text, metric_text, number_text, rate_text
from gradus.record.history import History
from gradus.record.page_html import Fact, Head

CHIPS = {"running": "good", "finished": "good", "failed": "bad", "lost": "bad", "queued": "warn", "stopped": "warn"}
UNAVAILABLE = "unavailable"
OVER = ("finished", "failed", "stopped", "lost")


def head_of(history: History, evidence: Evidence) -> Head:
    run = history.run
    facts = [
        _steps(history, evidence),
        *_losses(history),
        _speed(history),
        _mfu(history),
        _memory(history),
        *_spent(history, evidence),
        *_energy(history, evidence),
    ]
    return Head(
        f"{run.name}/{run.id}",
        _subtitle(history, evidence),
        evidence.state,
        CHIPS.get(evidence.state, ""),
        tuple(facts),
    )


def _subtitle(history: History, evidence: Evidence) -> str:
    recipe, parts = evidence.recipe, []
    if recipe is not None:
        parts.append(f"{recipe.model.use} on {recipe.data.use}, batch {recipe.batch}")
    elif evidence.script is not None:
        parts.append(evidence.script.text)
    if evidence.plan is not None or evidence.script is not None:
        ranks = evidence.ranks
        split = f" ({evidence.plan.mesh})" if evidence.plan is not None and ranks > 1 else ""
        parts.append(f"{count_text(ranks, 'rank')}{split}")
    if evidence.plan is not None:
        parts.append(evidence.plan.precision)
    begun = next((str(event["time"]) for event in history.events if event.get("time")), None)
    if begun is not None:
        parts.append(f"begun {begun[:16].replace('T', ' ')} UTC")
    count = len(evidence.run.attempts) if evidence.run else 0
    if count > 1:
        parts.append(f"{count} attempts")
    return " · ".join(parts)


def _steps(history: History, evidence: Evidence) -> Fact:
    status = evidence.status
    step = max(history.last_step, status.step if status else 0)
    total = f" of {status.steps_total:,}" if status is not None and status.steps_total else ""
    samples = history.last("samples")
    return Fact("steps", f"{step:,}{total}", f"{samples:,.0f} samples" if samples else "")


def _losses(history: History) -> list[Fact]:
    series = history.metrics.get("loss")
    if series is None:
        return [Fact("loss", UNAVAILABLE, "no step was logged")]
    since = series.first_not_finite
    if since is not None and (series.last is None or since > series.last[0]):
        return [Fact("loss", "no number", f"since step {since:g}")]
    if series.last is None:
        return [Fact("loss", UNAVAILABLE, "no step was logged")]
    facts = [Fact("loss", number_text(series.last[1]), f"{number_text(series.points[0][1])} at the first logged step")]
    for name in ("validation_loss", "validation_accuracy"):
        found = history.metrics.get(name)
        if found is not None and found.last is not None:
            best = (min if name.endswith("loss") else max)(y for _, y in found.points)
            label = name.removeprefix("validation_")
            note = f"best {metric_text(label, best)}" if len(found) > 1 else ""
            facts.append(Fact(f"validation {label}", metric_text(label, found.last[1]), note))
    return facts


def _speed(history: History) -> Fact:
    for name, unit in (("tokens_per_second", "tok"), ("samples_per_second", "samples")):
        median = history.rates[name].median
        if median:
            return Fact("speed", rate_text(median, unit), "median, without the first steps")
    return Fact("speed", UNAVAILABLE, "no step was logged")


def _mfu(history: History) -> Fact:
    mfu = history.rates["mfu"].median
    start = next((event for event in reversed(history.events) if event.get("peak_flops")), None)
    if mfu is None or start is None:
        return Fact("MFU", UNAVAILABLE, "the peak of this device is not known")
    peak = f"{start['peak_flops'] / 1e12:,.0f} TFLOP/s ({start.get('peak_source')})"
    flops = f"{start['flops_per_sample']:.3g} FLOPs a sample × samples/s"
    return Fact("MFU", f"{mfu:.1%}", f"{flops} ÷ {peak}")


def _memory(history: History) -> Fact:
    peaks = [y for found in history.memory.values() if "peak" in found for _, y in found["peak"].points]
    ranks = len(history.memory)
    if peaks:
        return Fact(
            "peak memory", bytes_text(max(peaks)), f"of {ranks} ranks, the one that needs most" if ranks > 1 else ""
        )
    series = history.metrics.get("memory_peak_bytes")
    if series is not None and series.last is not None:
        return Fact("peak memory", bytes_text(max(y for _, y in series.points)), "of rank 0")
    return Fact("peak memory", UNAVAILABLE, "not recorded")


def _spent(history: History, evidence: Evidence) -> list[Fact]:
    goodput = history.goodput()
    if not goodput.allocated_seconds:
        return []
    wait = f", and {duration_text(goodput.waiting_seconds)} between attempts" if goodput.waiting_seconds > 1 else ""
    facts = [
        Fact(
            "time",
            duration_text(goodput.allocated_seconds),
            f"{count_text(goodput.attempts, 'attempt')}{wait}",
        )
    ]
    hours = goodput.allocated_seconds / 3600
    if evidence.has_gpu:
        gpus = len(history.gpu_names) or evidence.ranks
        facts.append(Fact("GPU-hours", number_text(hours * gpus), f"{count_text(gpus, 'GPU')}, all attempts"))
    if goodput.share is not None:
        facts.append(Fact("goodput", f"{goodput.share:.1%}", "of that time in steps that count"))
    return facts


def _energy(history: History, evidence: Evidence) -> list[Fact]:
    energy = history.energy()
    if energy.joules is None:
        return [Fact("energy", UNAVAILABLE, _no_energy(history)), Fact("energy a sample", UNAVAILABLE)]
    watts = f"{energy.average_watts:,.0f} W on average" if energy.average_watts else ""
    facts = [Fact("energy of the GPUs", _energy_text(energy.joules), watts)]
    attempts = evidence.run.attempts if evidence.run else []
    per_sample = energy.per(history.last("samples"))
    if per_sample is None or len({one for one, _ in history.attempts_of_steps}) < len(attempts):
        facts.append(Fact("energy a sample", UNAVAILABLE, "not all attempts have samples and a counter"))
    else:
        facts.append(Fact("energy a sample", f"{number_text(per_sample)} J", "GPUs only, by the driver's counter"))
    return facts


def _no_energy(history: History) -> str:
    if not history.device_samples:
        return "devices were not sampled"
    if not history.has_driver:
        return "there is no NVIDIA driver"
    return "the driver has no energy counter, or was read only once"


def _energy_text(joules: float) -> str:
    if joules >= 3.6e5:
        return f"{joules / 3.6e6:,.3g} kWh"
    return f"{joules / 1e3:,.3g} kJ" if joules >= 1e4 else f"{joules:,.3g} J"
