"""Comparison: runs beside a baseline: speed-up, efficiency, what can be split, how the loss falls with size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.scaling_law import Refused, ScalingLaw, fit_scaling_law
from gradus.record.amdahl import Amdahl, Measured, amdahl, efficiency, outside_the_law, speed_up
from gradus.record.directory import RunDirectory
from gradus.record.history import History
from gradus.schema.differences import flat
from gradus.schema.errors import InputError

RATES = (("tokens_per_second", "tok"), ("samples_per_second", "samples"))
# Sizes that differ by less are the same: the last batch, or a few more parameters of a head.
_SAME_SIZE = 0.02
_DIVERGED = 1.1  # times the best loss so far
# What a step does, whatever ranks there are. How they share it (mesh, zero, micro-batches) is what scaling is about.
_WORK = (
    *("recipe.model", "recipe.data", "recipe.loss", "recipe.optimizer.use", "recipe.freeze", "recipe.lora"),
    *("recipe.deterministic", "recipe.anomaly", "plan.precision", "plan.fp8_scaling", "plan.accumulate_dtype"),
    "plan.narrow_weights",
    *("plan.recompute", "plan.recompute_blocks", "plan.loss_chunks", "plan.activation_offload", "plan.offload"),
    *("plan.compile", "plan.cuda_graph"),
    *("plan.channels_last", "plan.data_on_device", "plan.ranks_per_gpu"),
)


@dataclass(frozen=True)
class Compared:
    """One run of a comparison."""

    run: RunDirectory
    label: str
    history: History
    evidence: Evidence

    @cached_property
    def devices(self) -> int:
        """GPUs, or ranks where there are none."""
        return len(self.history.gpu_names) or self.evidence.ranks

    @cached_property
    def parameters(self) -> int | None:
        found = [event["parameters"] for event in self.history.events if isinstance(event.get("parameters"), int)]
        return found[-1] if found else None

    @property
    def batch(self) -> int | None:
        return self.evidence.recipe.batch if self.evidence.recipe is not None else None

    def measured(self, rate: str) -> Measured | None:
        found = self.history.rates[rate]
        return Measured(self.devices, found.median, found.standard_error) if found.median else None

    def trained_on(self) -> tuple[str, float] | None:
        """How much data it has seen: tokens, or samples."""
        for name in ("tokens", "samples"):
            amount = self.history.last(name)
            if amount:
                return name, amount
        return None

    @property
    def final_loss(self) -> float | None:
        """Of the last evaluation; without any, the last one logged."""
        loss = self.history.last("validation_loss")
        return loss if loss is not None else self.history.last("loss")

    @property
    def has_validation(self) -> bool:
        return self.history.last("validation_loss") is not None

    @property
    def diverged(self) -> bool:
        series = self.history.metrics.get("validation_loss" if self.has_validation else "loss")
        if series is None or series.last is None:
            return False
        return series.last[1] > _DIVERGED * min(y for _, y in series.points)


@dataclass(frozen=True)
class Comparison:
    """Runs, the first of which is the baseline."""

    runs: tuple[Compared, ...]
    rate: str | None  # the metric that all of them have
    amdahl: Amdahl | Refused
    law: ScalingLaw | Refused
    differences: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """By dotted key: the value of each run; only keys whose values differ."""

    @property
    def baseline(self) -> Compared:
        return self.runs[0]

    @property
    def unit(self) -> str:
        return dict(RATES).get(self.rate or "", "")

    def speed_ups(self) -> list[tuple[float | None, float | None]]:
        """Of each run against the baseline: speed-up, and efficiency for each device."""
        found = [one.measured(self.rate) if self.rate else None for one in self.runs]
        base = found[0]
        return [
            (speed_up(one, base), efficiency(one, base)) if one is not None and base is not None else (None, None)
            for one in found
        ]

    def doubts(self) -> list[str]:
        """What a reader must know before believing a speed-up."""
        said = []
        if self.rate is None:
            said.append("No speed-up: the runs have no rate in common; at least one logged no step.")
        keys = set(self.differences)
        if any(key.startswith("recipe.model") for key in keys):
            said.append("The models differ: speed-ups compare the rates of different work.")
        if len({one.devices for one in self.runs}) > 1 and (other := _other_work(self.runs, self.differences)):
            said.append(f"More than the GPUs or ranks differs: {', '.join(other)}. Speed-ups are of all that together.")
        if isinstance(self.amdahl, Amdahl) and len({one.batch for one in self.runs}) > 1:
            said.append(
                "The batch differs with the GPUs (weak scaling): the Amdahl fraction is of the time of a sample, and "
                "holds for batches that grow as they did here."
            )
        if _different_devices(self.runs):
            said.append("The runs are on different kinds of devices: efficiency is not only a matter of scaling.")
        return said

    def document(self) -> dict[str, Any]:
        law = self.law
        return {
            "baseline": self.baseline.label,
            "rate": self.rate,
            "runs": [
                {
                    "run": str(one.run.path),
                    "label": one.label,
                    "state": one.evidence.state,
                    "devices": one.devices,
                    "step": one.history.last_step,
                    "loss": one.history.last("loss"),
                    "validation_loss": one.history.last("validation_loss"),
                    "per_second": measured.rate if self.rate and (measured := one.measured(self.rate)) else None,
                    "speed_up": times,
                    "efficiency": share,
                }
                for one, (times, share) in zip(self.runs, self.speed_ups(), strict=True)
            ],
            "amdahl": {"refused": self.amdahl.reason}
            if isinstance(self.amdahl, Refused)
            else {
                "fraction": self.amdahl.fraction,
                "low": self.amdahl.low,
                "high": self.amdahl.high,
                "basis": self.amdahl.basis,
            },
            "scaling_law": {"refused": law.reason}
            if isinstance(law, Refused)
            else {
                "over": law.over,
                "floor": law.floor,
                "factor": law.factor,
                "exponent": law.exponent,
                "exponent_low": law.exponent_interval.low,
                "exponent_high": law.exponent_interval.high,
            },
            "differences": {key: list(values) for key, values in self.differences.items()},
            "doubts": self.doubts(),
        }


def compare(runs: Sequence[RunDirectory]) -> Comparison:
    """Read all of them; the first is the baseline."""
    if len({run.path for run in runs}) < len(runs):
        raise InputError("--compare: a run is named twice", field="--compare", found=[str(run.path) for run in runs])
    compared = []
    for run, label in zip(runs, _labels(runs), strict=True):
        history = History(run)
        history.poll()
        compared.append(Compared(run, label, history, Evidence.of_run(run)))
    rate = next((name for name, _ in RATES if all(one.measured(name) for one in compared)), None)
    differences = _differences(compared)
    fraction = _amdahl(compared, rate, differences)
    return Comparison(tuple(compared), rate, fraction, scaling_law(compared), differences)


def _amdahl(runs: Sequence[Compared], rate: str | None, differences: Mapping[str, Any]) -> Amdahl | Refused:
    """The share of the work that is split, if runs do the same work on different numbers of GPUs or ranks."""
    sizes = {one.devices for one in runs}
    if len(sizes) < 2:
        return Refused(f"it needs runs on different numbers of GPUs or ranks, and all have {min(sizes)}")
    if rate is None:
        return Refused("the runs have no rate in common")
    if other := _other_work(runs, differences):
        return Refused(f"it is of the same work on more GPUs or ranks, and these differ as well: {', '.join(other)}")
    points = [found for one in runs if (found := one.measured(rate))]
    law = amdahl(points)
    return law if law is not None else Refused(outside_the_law(points) or "no law goes through the speeds")


def _other_work(runs: Sequence[Compared], differences: Mapping[str, Any]) -> list[str]:
    """What differs between runs, besides the number of GPUs or ranks, and changes how long a step takes."""
    # Workers that the planner chose follow from the cores that each rank has: that is a part of scaling.
    chosen = any(one.evidence.recipe is not None and "workers" in one.evidence.recipe.plan.fixed for one in runs)
    work = (*_WORK, "plan.workers") if chosen else _WORK
    found = [key for key in differences if any(key == part or key.startswith(f"{part}.") for part in work)]
    batches = [one.batch for one in runs]
    each = [one.batch / one.devices for one in runs if one.batch]
    if len(set(batches)) > 1 and not (len(each) == len(runs) and _same(each)):
        found.append("recipe.batch (neither the same nor in proportion)")
    return [*found, *(["the kind of device"] if _different_devices(runs) else [])]


def _different_devices(runs: Sequence[Compared]) -> bool:
    return len({tuple(sorted(set(one.history.gpu_names.values()))) for one in runs}) > 1


def scaling_law(runs: Sequence[Compared]) -> ScalingLaw | Refused:
    """Over model size or over data, if the runs differ in one of them alone and were trained to their end."""
    if len(runs) < 2:
        return Refused("a law is over several runs")
    for one in runs:
        if one.evidence.state != "finished":
            return Refused(
                f"{one.label} is {one.evidence.state}: a run that was not trained to its end has no final loss"
            )
        if one.final_loss is None or one.trained_on() is None:
            return Refused(f"{one.label} has no loss")
        if one.diverged:
            return Refused(f"{one.label} diverged: its last loss is more than {_DIVERGED:g} times its best one")
    if len({one.has_validation for one in runs}) > 1:
        return Refused("some runs have a validation loss and some have none: these cannot be on one curve")
    amounts = [amount for one in runs if (amount := one.trained_on())]
    if len({name for name, _ in amounts}) > 1:
        return Refused("some runs count tokens and some count samples")
    unit, data = amounts[0][0], [amount for _, amount in amounts]
    sources = {str(one.evidence.recipe.data) if one.evidence.recipe else "" for one in runs}
    if len(sources) > 1:
        return Refused("the runs are trained on different data: their losses are not comparable")
    models = [one.parameters for one in runs]
    sizes = [float(parameters) for parameters in models if parameters is not None]
    same_model = len(sizes) == len(runs) and _same(sizes)
    if not sizes and len({str(one.evidence.recipe.model) if one.evidence.recipe else "" for one in runs}) == 1:
        same_model = True  # of an older version, which did not write the count down
    losses = [one.final_loss for one in runs if one.final_loss is not None]
    if same_model:
        return fit_scaling_law(data, losses, unit)
    if len(sizes) < len(runs):
        return Refused("not all runs say how many parameters they have: those of an older version do not")
    if not _same(data):
        return Refused(f"both the model and the number of {unit} differ: a law is over one of them")
    return fit_scaling_law(sizes, losses, "parameters")


def _same(values: Sequence[float]) -> bool:
    return max(values) <= min(values) * (1 + _SAME_SIZE)


def _labels(runs: Sequence[RunDirectory]) -> list[str]:
    """As short as they still tell the runs apart."""
    for form in (lambda run: run.name, lambda run: run.id, lambda run: f"{run.name}/{run.id}"):
        labels = [form(run) for run in runs]
        if len(set(labels)) == len(labels):
            return labels
    return [str(run.path) for run in runs]


def _differences(runs: Sequence[Compared]) -> dict[str, tuple[Any, ...]]:
    documents = [
        {
            **flat("recipe", _document(one.evidence.recipe, without=("plan", "name"))),
            **flat("plan", _document(one.evidence.plan)),
            **flat("cluster", _document(one.evidence.cluster)),
            **flat("packages", one.evidence.environment.get("packages") or {}),
            "git.commit": (one.evidence.environment.get("git") or {}).get("commit"),
        }
        for one in runs
    ]
    keys = list(dict.fromkeys(key for document in documents for key in document))
    found = {key: tuple(document.get(key) for document in documents) for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _document(model: Any, without: Sequence[str] = ()) -> dict[str, Any]:
    if model is None:
        return {}
    return {key: value for key, value in model.model_dump(mode="json").items() if key not in without}
