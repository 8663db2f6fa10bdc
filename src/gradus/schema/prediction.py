"""Prediction: what a plan would need and how fast it would be, before it runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
Verdict = Literal["fits", "tight", "no"]
PREDICTION_FILE = "prediction.json"  # in the folder of an attempt, beside its plan


class MemoryPrediction(BaseModel):
    """Bytes on the device at the peak, by kind, of the rank that needs most. They add up to `peak`."""

    model_config = _STRICT

    parameters: int = 0  # in the format that is computed with, gathered ones and copies in it included
    master: int = 0  # the copy that the optimizer changes, where it is another one
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0  # the output over the vocabulary or the classes, and what the loss makes of it
    communication: int = 0  # buckets, gathered shards on their way, libraries' own buffers
    device_context: int = 0  # what the driver takes for a process that uses the device; 0 under plan.memory_limit_gib
    fragmentation: int = 0  # what the allocator holds and nobody uses

    @property
    def peak(self) -> int:
        return sum(getattr(self, name) for name in type(self).model_fields)

    @property
    def tensors(self) -> int:
        """Without what the driver and the allocator add: what torch reports as allocated."""
        return self.peak - self.device_context - self.fragmentation


class HostMemoryPrediction(BaseModel):
    """Bytes of host memory on a node."""

    model_config = _STRICT

    offload: int = 0
    loading: int = 0
    saving: int = 0

    @property
    def peak(self) -> int:
        return sum(getattr(self, name) for name in type(self).model_fields)


class StepPrediction(BaseModel):
    """Seconds of an optimizer step, by kind. They add up to `total`; what is overlapped costs nothing."""

    model_config = _STRICT

    compute: float = 0.0
    recompute: float = 0.0
    exposed_communication: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    data: float = 0.0
    overlapped_communication: float = 0.0

    @property
    def total(self) -> float:
        kinds = set(type(self).model_fields) - {"overlapped_communication"}
        return float(sum(getattr(self, name) for name in sorted(kinds)))


class BudgetPrediction(BaseModel):
    """The whole run. What the cluster does not say (failures, price, power) is None.

    Where failures come faster than checkpoints are written, goodput is 0, and time and GPU-hours
    are infinite.
    """

    model_config = _STRICT

    steps: int
    seconds: float  # of training, without failures
    seconds_with_failures: float | None = None
    gpu_hours: float
    energy_kwh: float | None = None
    cost: float | None = None  # in the currency of price_per_gpu_hour
    checkpoint_stall_seconds: float | None = None  # that training stops for a checkpoint
    checkpoint_seconds: float | None = None  # until it is written, beside training
    checkpoint_every_seconds: float | None = None  # the best interval
    goodput: float | None = None  # the share of time in steps which count, saving as often as the plan says


class Prediction(BaseModel):
    """Everything that is predicted of a plan, with the same names in Python and in JSON."""

    model_config = _STRICT

    memory: MemoryPrediction
    peak_at: str  # where in the step the peak is
    limit_bytes: int | None  # of the device; None where it is not known
    memory_error: float  # the stated relative error of `memory.peak`: what is inside it is called tight
    host_memory: HostMemoryPrediction = HostMemoryPrediction()
    step: StepPrediction | None  # None where the speed of the device is not known
    step_error: float | None = None  # the stated relative error of `step.total`
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    model_flops: float  # of a step, over all ranks, without recomputation
    hardware_flops: float  # with it
    mfu: float | None = None
    hfu: float | None = None
    peak_flops: float | None = None  # of one device: the denominator of mfu and hfu
    verdict: Verdict
    budget: BudgetPrediction | None = None
    provenance: str = "predicted"
    basis: list[str] = []  # what it rests on, a sentence each: traced or estimated, calibrated or not, assumptions

    def document(self) -> dict[str, Any]:
        """As `--json` prints it: with the sums, and null for what has no end (a run that failures outpace)."""
        document: dict[str, Any] = _finite(self.model_dump())
        document["memory"]["peak"] = self.memory.peak
        document["host_memory"]["peak"] = self.host_memory.peak
        if self.step is not None:
            document["step"]["total"] = self.step.total
        return document

    def to_json(self) -> str:
        return json.dumps(self.document(), indent=1, allow_nan=False)

    @classmethod
    def load(cls, path: Path) -> Prediction:
        """As it was written; sums are no fields."""
        document = json.loads(path.read_text())
        for block, name in (("memory", "peak"), ("host_memory", "peak"), ("step", "total")):
            if document[block] is not None:
                document[block].pop(name)
        budget = document["budget"]
        if budget is not None and budget["goodput"] == 0:
            budget["seconds_with_failures"] = math.inf
            budget["gpu_hours"] = math.inf if budget["gpu_hours"] is None else budget["gpu_hours"]
        return cls.model_validate(document)


def _finite(value: Any) -> Any:
    """JSON has no word for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
