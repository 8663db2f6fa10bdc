"""Costs: where the time of a run's steps went, and what energy its GPUs took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradus.record.append_log import read_lines
from gradus.record.device_log import Energy, energy_between, energy_of, read_device_samples
from gradus.record.directory import RunDirectory
from gradus.record.timings import by_rank, mean_seconds, mean_step_seconds, read_timings
from gradus.schema.breakdown import Breakdown
from gradus.schema.device_sample import DeviceSample

NO_DRIVER = "there is no NVIDIA driver where it ran"
NO_COUNTER = "the driver of its GPUs does not count energy"
NOT_SAMPLED = "its devices were not sampled"


@dataclass(frozen=True)
class Costs:
    """None is what was not measured."""

    attempt: int | None  # the last one that has timings: these are its own
    ranks: int
    step_seconds: float | None  # mean over ranks and steps, without the first step; saves and evaluations included
    seconds: dict[str, float]  # of it, by kind
    energy: Energy  # of all attempts, from launch to end
    why_no_energy: str | None
    joules_per_sample: float | None  # while training
    joules_per_token: float | None

    def document(self) -> dict[str, Any]:
        return {
            "step_seconds_by_kind": self.seconds or None,
            "energy_joules": self.energy.joules,
            "average_watts": self.energy.average_watts,
            "joules_per_sample": self.joules_per_sample,
            "joules_per_token": self.joules_per_token,
        }

    def lines(self) -> list[str]:
        """As people read it: a line for each kind, and one for the energy."""
        found = []
        if self.step_seconds:
            of = f"mean of {self.ranks} ranks" if self.ranks > 1 else "rank 0"
            found.append(f"where the time of a step went ({of}, {_seconds_text(self.step_seconds)} in all)")
            shown = [(kind.replace("_", " "), spent) for kind, spent in self.seconds.items() if spent > 0]
            width = max(len(kind) for kind, _ in shown)
            for kind, spent in shown:
                found.append(f"  {kind:<{width}}  {_seconds_text(spent):>8}  {spent / self.step_seconds:6.1%}")
        found.append(f"energy  {self._energy_text()}")
        return found

    def _energy_text(self) -> str:
        if self.energy.joules is None:
            return f"unavailable: {self.why_no_energy}"
        watts = self.energy.average_watts
        text = _joules_text(self.energy.joules) + (f" ({watts:.0f} W on average)" if watts is not None else "")
        per_sample = "unavailable" if self.joules_per_sample is None else _joules_text(self.joules_per_sample)
        text += f", per sample {per_sample}"
        return text if self.joules_per_token is None else f"{text}, per token {_joules_text(self.joules_per_token)}"


def costs_of(run: RunDirectory) -> Costs:
    timings = read_timings(run)
    attempt = max((one.attempt for one in timings), default=None)
    usual = _without_first(one for one in timings if one.attempt == attempt)
    samples = read_device_samples(run)
    energy = energy_of(samples)
    per_sample, per_token = _for_each(run, timings, samples)
    return Costs(
        attempt,
        len({one.rank for one in usual}),
        mean_step_seconds(usual),
        mean_seconds(usual),
        energy,
        None if energy.joules is not None else _why_none(samples),
        per_sample,
        per_token,
    )


def _without_first(timings: Any) -> list[Breakdown]:
    """The first line of a rank is of its first step, in which caches fill and a compiler may be at work."""
    ranks = by_rank(timings)
    return [one for lines in ranks.values() for one in (lines[1:] if len(lines) > 1 else lines)]


def _why_none(samples: Sequence[DeviceSample]) -> str:
    if not samples:
        return NOT_SAMPLED
    return NO_COUNTER if any(sample.gpus for sample in samples) else NO_DRIVER


def _for_each(
    run: RunDirectory, timings: Sequence[Breakdown], samples: Sequence[DeviceSample]
) -> tuple[float | None, float | None]:
    """Joules for a sample and for a token, from the first logged step of each attempt to its last."""
    rows = read_lines(run.metrics_path).records
    spans: dict[int, tuple[float, float]] = {}
    trained = tokens = 0.0
    for attempt in sorted({one.attempt for one in timings}):
        mine = [one for one in timings if one.attempt == attempt and one.rank == 0]
        logged = {row["step"]: row for row in rows if row.get("attempt") == attempt and _counts(row)}
        ends = [one for one in mine if one.step in logged]
        if len(ends) < 2:
            continue
        first, last = logged[ends[0].step], logged[ends[-1].step]
        spans[attempt] = (ends[0].time, ends[-1].time)
        trained += last["samples"] - first["samples"]
        tokens += (last.get("tokens") or 0) - (first.get("tokens") or 0)
    energy = energy_between(samples, spans)
    return energy.per(trained), energy.per(tokens)


def _counts(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("step"), int) and isinstance(row.get("samples"), (int, float))


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _joules_text(joules: float) -> str:
    for unit, size in (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0), ("mJ", 1e-3)):
        if joules >= size or unit == "mJ":
            return f"{joules / size:.3g} {unit}"
    raise AssertionError("the last unit takes everything")
