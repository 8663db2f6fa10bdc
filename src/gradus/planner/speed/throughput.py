"""Throughput: what the time of a step comes to in samples, tokens and floating-point operations. No torch.

    MFU = FLOPs of the model in a step / (seconds of the step × devices × peak of one)
    HFU = the same with what is computed twice, too

FLOPs of the model are those of its matrix products, convolutions and attention, forward and backward, without
recomputation; causal attention counts the half of all pairs that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradus.planner.profile.program import ModelProfile
from gradus.planner.rewritten.as_planned import as_planned
from gradus.planner.rewritten.spared_blocks import with_spared_blocks
from gradus.planner.speed.device import Device
from gradus.schema.plan import Plan


@dataclass(frozen=True)
class Throughput:
    samples_per_second: float
    tokens_per_second: float | None
    mfu: float | None
    hfu: float | None
    peak_flops: float | None


def model_flops(profile: ModelProfile, plan: Plan) -> float:
    """Of a step, over all ranks, without recomputation."""
    samples = plan.micro_batch * plan.accumulate * plan.mesh.data_ranks
    return profile.flops(plan.micro_batch) * samples / plan.micro_batch


def hardware_flops(profile: ModelProfile, plan: Plan) -> float:
    """Of a step, over all ranks, with what is computed twice."""
    samples = plan.micro_batch * plan.accumulate * plan.mesh.data_ranks
    profile = with_spared_blocks(profile, plan)
    again = {
        number: sum(op.flops.at(plan.micro_batch) for op in as_planned(profile, number, plan).recompute)
        for number in set(profile.calls)
    }
    twice = sum(again[number] for number in profile.calls)
    return model_flops(profile, plan) + twice * samples / plan.micro_batch


def throughput(profile: ModelProfile, plan: Plan, step_seconds: float, device: Device | None) -> Throughput:
    """Over all ranks. No MFU without a peak for the precision of the plan."""
    samples = plan.micro_batch * plan.accumulate * plan.mesh.data_ranks / step_seconds
    tokens = samples * profile.tokens_per_sample if profile.tokens_per_sample else None
    peak = device.peak.get(plan.precision) if device is not None else None
    devices = plan.mesh.world_size / plan.ranks_per_gpu

    def share(flops: float) -> float | None:
        return flops / (step_seconds * devices * peak) if peak else None

    return Throughput(samples, tokens, share(model_flops(profile, plan)), share(hardware_flops(profile, plan)), peak)
