"""Choices with predictions, made by hand: for what shows them, and needs no model behind them."""

from __future__ import annotations

from typing import Any

from gradus.planner.defaults import Choice
from gradus.schema.plan import Mesh, Plan
from gradus.schema.prediction import (
    BudgetPrediction,
    HostMemoryPrediction,
    MemoryPrediction,
    Prediction,
    StepPrediction,
)

GIB = 2**30
REFUSED = [{"plan": "replicate 128", "reason": "needs 143 GiB of 80: optimizer 96"}]


def prediction(optimizer_gib: int = 24, compute: float = 1.2, **changes: Any) -> Prediction:
    memory = MemoryPrediction(
        parameters=6 * GIB,
        master=12 * GIB,
        gradients=12 * GIB,
        optimizer=optimizer_gib * GIB,
        activations=9 * GIB,
        logits=GIB,
        device_context=GIB // 2,
        fragmentation=GIB // 2,
    )
    step = StepPrediction(
        compute=compute,
        recompute=0.2,
        exposed_communication=0.1,
        bubble=0.05,
        optimizer=0.05,
        overlapped_communication=0.31,
    )
    budget = BudgetPrediction(
        steps=100_000,
        seconds=100_000 * step.total,
        seconds_with_failures=104_000 * step.total,
        gpu_hours=128 * 104_000 * step.total / 3600,
        energy_kwh=51.2 * 104_000 * step.total / 3600,
        cost=1280 * 104_000 * step.total / 3600,
        checkpoint_stall_seconds=20.0,
        checkpoint_seconds=118.0,
        checkpoint_every_seconds=9800.0,
        goodput=1 / 1.04,
    )
    known: dict[str, Any] = {
        "memory": memory,
        "peak_at": "backward of block 23",
        "limit_bytes": 80 * GIB,
        "memory_error": 0.05,
        "host_memory": HostMemoryPrediction(loading=2 * GIB),
        "step": step,
        "tokens_per_second": 1_250_000 / step.total,
        "samples_per_second": 1000 / step.total,
        "model_flops": 1e15,
        "hardware_flops": 1.25e15,
        "mfu": 0.41,
        "hfu": 0.5125,
        "peak_flops": 312e12,
        "verdict": "fits" if optimizer_gib < 34 else "tight" if optimizer_gib < 43 else "no",
        "budget": budget,
        "basis": ["Traced as CUDA would run it.", "Speeds: <quoted> of A100-SXM4-80GB."],
    }
    return Prediction(**{**known, **changes})


CHOICES = [
    Choice(
        Plan(mesh=Mesh(replicate=16, tensor=8), micro_batch=4, accumulate=2, precision="bf16"),
        {"mesh": "16 replicas of <8 slices>", "zero": "nothing is sharded"},
        prediction(),
    ),
    Choice(
        Plan(
            mesh=Mesh(replicate=2, pipeline=4, shard=8, tensor=2),
            zero=1,
            micro_batch=2,
            accumulate=16,
            precision="bf16",
            recompute="full",
            pipeline_schedule="interleaved",
            stages_per_rank=2,
        ),
        {"mesh": "stages between nodes"},
        prediction(36, 2.1),
    ),
    Choice(Plan(mesh=Mesh(shard=128), zero=3, micro_batch=2, precision="bf16"), {}, prediction(12, 1.7)),
]
