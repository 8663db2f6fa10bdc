"""Calibration: what a few measured steps say about predictions, and predictions that heed it. No torch.

A factor is measured over predicted, of one kind. It is measured on one rank, so it says nothing about communication,
and what follows from counting (parameters, gradients, optimizer state) has no factor.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from gradus.schema.calibration import Calibration, MemoryKind, StepKind
from gradus.schema.cluster import Cluster
from gradus.schema.prediction import MemoryPrediction, Prediction, StepPrediction

# A factor beyond these is no correction: something else was measured than was predicted.
LEAST, MOST = 0.1, 10.0
SMALLEST_BYTES = 64 * 2**20  # of memory that is compared: below, rounding of the allocator decides


@dataclass(frozen=True)
class Measured:
    """Steps of one rank on the device at hand. Seconds are medians over steps."""

    device: str
    software: str
    steps: int
    seconds: float  # of a step
    compute_seconds: float  # forward and backward, recomputation included
    optimizer_seconds: float
    data_seconds: float  # that the device waited for samples
    allocated_bytes: int | None = None  # the most that tensors took; None on a CPU
    reserved_bytes: int | None = None  # the most that the allocator held
    context_bytes: int | None = None  # what the driver takes besides


@dataclass(frozen=True)
class Compared:
    """One kind, predicted and measured. Seconds or bytes."""

    kind: str
    predicted: float | None  # None: nothing was predicted of it
    measured: float
    factor: float | None = None  # None: it is shown, and nothing is corrected by it
    unit: str = "seconds"


def compared(prediction: Prediction, measured: Measured) -> list[Compared]:
    """Measured beside predicted, by kind. The prediction is of the very plan that ran, and not calibrated."""
    return [*_compared_step(prediction.step, measured), *_compared_memory(prediction.memory, measured)]


def _compared_step(step: StepPrediction | None, measured: Measured) -> list[Compared]:
    if step is None:
        return [
            Compared("compute", None, measured.compute_seconds),
            Compared("optimizer", None, measured.optimizer_seconds),
            Compared("data", None, measured.data_seconds),
            Compared("step", None, measured.seconds),
        ]
    compute = step.compute + step.recompute  # the device does not tell one from the other
    return [
        Compared("compute", compute, measured.compute_seconds, _factor(measured.compute_seconds, compute)),
        Compared(
            "optimizer", step.optimizer, measured.optimizer_seconds, _factor(measured.optimizer_seconds, step.optimizer)
        ),
        Compared("data", step.data, measured.data_seconds),
        Compared("step", step.total, measured.seconds),
    ]


def _compared_memory(memory: MemoryPrediction, measured: Measured) -> list[Compared]:
    if measured.allocated_bytes is None:
        return []
    made = memory.activations + memory.logits
    # What is not activations is counted, so the whole difference is theirs.
    rest = measured.allocated_bytes - (memory.tensors - made)
    lines = [Compared("activations", made, max(0, rest), _bytes_factor(rest, made), "bytes")]
    if measured.reserved_bytes is not None:
        held = measured.reserved_bytes - measured.allocated_bytes
        lines.append(
            Compared("fragmentation", memory.fragmentation, held, _bytes_factor(held, memory.fragmentation), "bytes")
        )
    if measured.context_bytes is not None:
        factor = _bytes_factor(measured.context_bytes, memory.device_context)
        lines.append(Compared("device_context", memory.device_context, measured.context_bytes, factor, "bytes"))
    lines.append(Compared("allocated", memory.tensors, measured.allocated_bytes, None, "bytes"))
    return lines


def _factor(measured: float, predicted: float) -> float | None:
    if predicted <= 0 or measured <= 0:
        return None
    factor = measured / predicted
    return round(factor, 4) if LEAST <= factor <= MOST else None


def _bytes_factor(measured: float, predicted: float) -> float | None:
    return _factor(measured, predicted) if min(measured, predicted) >= SMALLEST_BYTES else None


def calibration_of(lines: list[Compared], measured: Measured, flops: float, speed_known: bool) -> Calibration:
    """What to write into the cluster file. `flops` are those of a step, recomputation included.

    Where the speed of the device is not known at all, as of CPUs, that is the FLOP/s that were achieved.
    """
    factors: dict[StepKind | MemoryKind, float] = {}
    for line in lines:
        if line.factor is None:
            continue
        if line.kind == "compute":
            factors["compute"] = factors["recompute"] = line.factor
        elif line.kind == "activations":
            factors["activations"] = factors["logits"] = line.factor
        elif line.kind == "optimizer":
            factors["optimizer"] = line.factor
        elif line.kind == "fragmentation":
            factors["fragmentation"] = line.factor
        elif line.kind == "device_context":
            factors["device_context"] = line.factor
    achieved = None if speed_known else flops / (measured.compute_seconds + measured.optimizer_seconds)
    return Calibration(
        device=measured.device,
        software=measured.software,
        date=datetime.date.today().isoformat(),
        factors=factors,
        flops_per_second=float(f"{achieved:.4g}") if achieved is not None else None,
    )


def corrected_memory(memory: MemoryPrediction, calibration: Calibration) -> MemoryPrediction:
    """Predicted memory with measured factors."""
    kinds: tuple[MemoryKind, ...] = ("activations", "logits", "communication", "device_context", "fragmentation")
    return memory.model_copy(update={kind: round(getattr(memory, kind) * calibration.factor(kind)) for kind in kinds})


def step_at_achieved_rate(flops: float, calibration: Calibration, ranks: int = 1) -> StepPrediction | None:
    """A step where nobody quotes a speed, as of CPUs, at the FLOP/s that were achieved; `flops` are those of a rank.

    They were achieved by one rank with the whole node, which the `ranks` on a node share.
    """
    if calibration.flops_per_second is None:
        return None
    return StepPrediction(compute=flops * ranks / calibration.flops_per_second)


def calibration_basis(cluster: Cluster) -> list[str]:
    """What a prediction for this cluster says about it."""
    known = cluster.calibration
    if not known.measured:
        return ["Not calibrated: gradus plan --measure compares with real steps."]
    on = ", ".join(text for text in (known.device, known.software, known.date) if text)
    said = f"Calibrated on {on}" if on else "Calibrated, the cluster file does not say on what"
    if known.factors:
        said += ": " + ", ".join(f"{kind} × {factor:.3g}" for kind, factor in known.factors.items())
    if known.flops_per_second is not None:
        said += f": {known.flops_per_second / 1e9:,.3g} GFLOP/s achieved, all of a step in proportion to its FLOPs"
    return [said + "."]
