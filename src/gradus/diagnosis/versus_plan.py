"""Plan against measured: each kind of time and memory beside what was predicted of it, the largest deviations first.

What is compared, and how a difference is attributed, is the planner's own calibration (planner/calibration.py): a run
and `gradus plan --measure` speak of the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from gradus.diagnosis.evidence import Evidence
from gradus.planner.calibration import Measured, compared
from gradus.schema.prediction import Prediction

NOT_MEASURED = "not measured"
NOT_PREDICTED = "nothing was predicted"
AS_PREDICTED = 0.1  # so far off, relatively, and it needs no explanation
COUNTED = ("parameters", "master", "gradients", "optimizer", "communication")  # memory that follows from counting


@dataclass(frozen=True)
class Deviation:
    """One kind, predicted and measured. None is what nobody predicted, or what nobody measured."""

    kind: str
    predicted: float | None
    measured: float | None
    unit: str  # seconds, bytes, tok/s, samples/s
    ratio: float | None  # measured over predicted
    why: str

    def document(self) -> dict[str, Any]:
        return asdict(self)


def versus_plan(evidence: Evidence) -> list[Deviation]:
    """Empty where nothing was measured. Without a prediction, as on a CPU, what was measured stands alone."""
    measured = measured_by(evidence)
    if measured is None:
        return []
    lines = list(_lines(evidence, measured))
    told = [replace(line, why=_mostly(lines)) if _is_far_off(line) and line.kind == "total" else line for line in lines]
    return sorted(told, key=lambda line: -_weight(line, evidence.prediction, measured))


def _is_far_off(line: Deviation) -> bool:
    return line.ratio is not None and abs(line.ratio - 1) > AS_PREDICTED


def _mostly(lines: list[Deviation]) -> str:
    """Which kind of time the whole differs by most."""
    parts = [
        (line.measured - line.predicted, line.kind)
        for line in lines
        if line.unit == "seconds" and line.kind != "total" and line.measured is not None and line.predicted is not None
    ]
    if not parts:
        return "no kind of it was predicted by itself"
    off, kind = max(parts, key=lambda part: abs(part[0]))
    return f"mostly {kind}: {abs(off):.3g} s {'more' if off > 0 else 'less'} than predicted"


def measured_by(evidence: Evidence) -> Measured | None:
    """What the run says about itself, in the planner's own terms; of the rank that needs most memory."""
    if not evidence.timings or not evidence.step_seconds:
        return None
    seconds = evidence.seconds
    peaks = [one.memory_peak_bytes for one in evidence.timings if one.memory_peak_bytes is not None]
    held = [one.memory_reserved_bytes for one in evidence.timings if one.memory_reserved_bytes is not None]
    gpus = evidence.environment.get("gpus") or []
    on_gpu = evidence.has_gpu
    return Measured(
        device=str(gpus[0].get("name")) if gpus and on_gpu else "CPU",
        software=f"torch {evidence.environment.get('packages', {}).get('torch', '?')}",
        steps=evidence.steps_measured,
        # A prediction is of a step alone: saving and evaluating are no part of it.
        seconds=evidence.step_seconds - seconds["checkpoint"] - seconds["evaluation"],
        compute_seconds=seconds["forward"] + seconds["backward"],
        optimizer_seconds=seconds["optimizer"],
        data_seconds=seconds["data"] + seconds["host_to_device"],
        allocated_bytes=max(peaks) if peaks and on_gpu else None,
        reserved_bytes=max(held) if held else None,
    )


def _lines(evidence: Evidence, measured: Measured) -> Iterator[Deviation]:
    prediction = evidence.prediction
    step = prediction.step if prediction else None
    if prediction is not None:
        for line in compared(prediction, measured):
            kind = {"step": "total"}.get(line.kind, line.kind)
            yield _deviation(evidence, kind, line.predicted, line.measured, line.unit)
        yield from _counted(prediction)
        if measured.allocated_bytes is None:
            yield _deviation(evidence, "allocated", prediction.memory.tensors, None, "bytes")
    else:
        for kind, seconds in (
            ("total", measured.seconds),
            ("compute", measured.compute_seconds),
            ("optimizer", measured.optimizer_seconds),
            ("data", measured.data_seconds),
        ):
            yield _deviation(evidence, kind, None, seconds, "seconds")
    waiting = evidence.seconds["exposed_communication"]
    # In a pipeline, ranks wait for others while it fills and drains; a clock cannot tell that from a transfer.
    predicted = step.exposed_communication + step.bubble if step else None
    yield _deviation(evidence, "exposed_communication", predicted, waiting, "seconds")
    hidden = [(t.communication_seconds - t.exposed_communication_seconds) / t.steps for t in evidence.traces if t.steps]
    if hidden or (step is not None and step.overlapped_communication):
        predicted = step.overlapped_communication if step else None
        yield _deviation(evidence, "overlapped_communication", predicted, max(hidden, default=None), "seconds")
    for unit, name in (("tok/s", "tokens_per_second"), ("samples/s", "samples_per_second")):
        rates = [row[name] for row in evidence.rows if row.get(name)]
        said = getattr(prediction, name) if prediction else None
        if rates or said:
            yield _deviation(evidence, name, said, median(rates[3:] or rates) if rates else None, unit)


def _counted(prediction: Prediction) -> Iterator[Deviation]:
    """Memory whose kinds nobody can tell apart from outside while a run goes on."""
    for kind in COUNTED:
        predicted = getattr(prediction.memory, kind)
        if predicted:
            why = f"{NOT_MEASURED} by itself: it is counted, and the whole difference shows as activations"
            yield Deviation(kind if kind != "optimizer" else "optimizer_state", predicted, None, "bytes", None, why)


def _deviation(evidence: Evidence, kind: str, predicted: float | None, measured: float | None, unit: str) -> Deviation:
    ratio = measured / predicted if predicted and measured is not None else None
    return Deviation(kind, predicted, measured, unit, ratio, _why(evidence, kind, predicted, measured, ratio))


def _why(evidence: Evidence, kind: str, predicted: float | None, measured: float | None, ratio: float | None) -> str:
    """A sentence for what is far off."""
    if measured is None:
        return NOT_MEASURED
    if predicted is None:
        return NOT_PREDICTED
    if ratio is not None and abs(ratio - 1) <= AS_PREDICTED:
        return "as predicted"
    more = measured > predicted
    if kind == "data":
        return "steps wait for samples, which a plan cannot foresee" if more else "loading is hidden"
    if kind == "exposed_communication":
        if more and len(evidence.own_seconds) > 1:
            spread = max(evidence.own_seconds.values()) - min(evidence.own_seconds.values())
            if spread > (measured - predicted) / 2:
                return f"ranks wait for the slowest: their own parts differ by {spread:.3g} s"
        return (
            "links are slower than the cluster file says, or less is hidden" if more else "more is hidden than expected"
        )
    if kind == "compute":
        starved = [t.launch_starved_seconds / t.span_seconds for t in evidence.traces if t.span_seconds > 0]
        if more and starved and max(starved) > AS_PREDICTED:
            return f"the device waits for launches for {max(starved):.0%} of the time"
        if evidence.cluster is not None and not evidence.cluster.calibration.measured:
            return "not calibrated on this device: gradus plan --measure writes the factor into the cluster file"
        return "slower kernels than were calibrated with" if more else "faster kernels than were calibrated with"
    if kind == "optimizer":
        return (
            "the update is bound by memory bandwidth, or by launches of many small tensors"
            if more
            else "a fused update"
        )
    if kind in ("total", "tokens_per_second", "samples_per_second"):
        return "follows from the kinds of time"
    if kind == "activations":
        return "what backward keeps is more than was traced" if more else "what backward keeps is less than was traced"
    if kind == "fragmentation":
        return "the allocator holds more than tensors take" if more else "the allocator holds little besides"
    return "more than predicted" if more else "less than predicted"


def _weight(line: Deviation, prediction: Prediction | None, measured: Measured) -> float:
    """How much a deviation matters: its part of the step, or of the device's peak. Unknown ones come last."""
    if line.measured is None:
        return -1.0
    if line.predicted is None:
        return 0.0
    off = abs(line.measured - line.predicted)
    if line.unit == "seconds":
        return off / max(measured.seconds, 1e-12)
    if line.unit == "bytes":
        return off / max(prediction.memory.peak if prediction else 1, 1)
    return 0.0  # rates follow from the step
