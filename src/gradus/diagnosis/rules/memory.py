"""Memory: left unused, nearly all used, in pieces, or saved by recomputing what there would be room for."""

from __future__ import annotations

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Finding
from gradus.planner.choice.typed import options
from gradus.record.format import count_text
from gradus.schema.plan import Plan

UNUSED = 0.5  # of the limit, that is in use at the peak: below, twice the activations would fit
FULL = 0.95
GROWS_TO = 0.8  # of the limit, that a larger micro-batch may take
IN_PIECES = 0.2  # of the limit, that the allocator holds and no tensor uses
LEAST_GAIN = 0.05
SOMEWHAT_LARGER = 0.1  # of computing


def limit_bytes(evidence: Evidence) -> int | None:
    """Of the device: a GPU's memory, or on a CPU a rank's share of the node's."""
    if evidence.has_gpu:
        if evidence.plan is not None and evidence.plan.memory_limit_gib is not None:
            return int(evidence.plan.memory_limit_gib * 2**30)
        sizes = [g.memory_total_bytes for s in evidence.device_samples for g in s.gpus or () if g.memory_total_bytes]
        if sizes:
            return min(sizes)
        return evidence.prediction.limit_bytes if evidence.prediction else None
    hosts = [one.host.memory_total_bytes for one in evidence.device_samples if one.host.memory_total_bytes]
    return min(hosts) // evidence.ranks_on_a_node if hosts else None


def peak_bytes(evidence: Evidence) -> int | None:
    """Held at the peak by the rank that needs most: by the allocator of a GPU, or resident on a CPU."""
    held = [one.memory_reserved_bytes for one in evidence.timings if one.memory_reserved_bytes is not None]
    used = [one.memory_peak_bytes for one in evidence.timings if one.memory_peak_bytes is not None]
    found = (held or used) if evidence.has_gpu else used
    return max(found) if found else None


def memory_headroom(evidence: Evidence) -> Finding | None:
    """Only where the recipe itself asks for small micro-batches: what the planner chose, it chose for its speed."""
    plan, peak, limit = evidence.plan, peak_bytes(evidence), limit_bytes(evidence)
    if plan is None or evidence.recipe is None or not evidence.has_gpu or not evidence.step_seconds:
        return None
    chosen = {"micro_batch", "accumulate"} & evidence.recipe.plan.fixed
    if peak is None or not limit or peak > UNUSED * limit or plan.mesh.pipeline > 1 or not chosen:
        return None
    factor = _larger_by(plan, GROWS_TO * limit / peak)
    if factor == 1:
        return None
    computing = evidence.share("forward") + evidence.share("backward")
    gain = computing * (1 - 1 / factor)
    starved = [
        (trace.launch_starved_seconds + trace.small_kernel_share * trace.busy_seconds) / trace.span_seconds
        for trace in evidence.traces
        if trace.span_seconds > 0
    ]
    if starved:
        # What larger micro-batches save is launching, and kernels that do not fill the device: a few above ten
        # microseconds are among them.
        gain = min(gain, max(starved) + computing * SOMEWHAT_LARGER)
    if gain < LEAST_GAIN:
        return None
    return Finding(
        "memory-headroom",
        f"{1 - peak / limit:.0%} of the GPU's memory is never used, while a step is made of {plan.accumulate} "
        f"micro-batches of {plan.micro_batch}",
        {
            "memory_peak_bytes": peak,
            "memory_limit_bytes": limit,
            "micro_batch": plan.micro_batch,
            "accumulate": plan.accumulate,
        },
        f"--set plan.micro_batch={plan.micro_batch * factor} --set plan.accumulate={plan.accumulate // factor}",
        gain,
        "medium",
        "waste",
        not_measured=() if starved else ("how far kernels fill the device: gradus train --profile steps=5",),
    )


def _larger_by(plan: Plan, room: float) -> int:
    """The largest factor by which micro-batches may grow: it divides their number, and memory allows it."""
    return max(f for f in range(1, plan.accumulate + 1) if plan.accumulate % f == 0 and (f == 1 or f <= room))


def needless_recompute(evidence: Evidence) -> Finding | None:
    plan, peak, limit = evidence.plan, peak_bytes(evidence), limit_bytes(evidence)
    if plan is None or plan.recompute == "none" or peak is None or not limit or not evidence.step_seconds:
        return None
    # Recomputing everything makes the forward pass twice; the selective kind only the attention of it.
    again = evidence.share("forward") * (1.0 if plan.recompute == "full" else 0.5)
    some, without, foreseen = "", options({"plan.recompute": "none"}), evidence.prediction
    if plan.recompute_blocks is not None:
        # How many there are is not written down, but the plan's prediction knows it.
        if foreseen is not None and foreseen.step is not None and foreseen.step.total > 0:
            again = min(again, foreseen.step.recompute / foreseen.step.total)
        some = f" in {count_text(plan.recompute_blocks, 'block')}"
        without = options({"plan.recompute": "none", "plan.recompute_blocks": None})
    if peak > UNUSED * limit or again < LEAST_GAIN:
        return None
    return Finding(
        "needless-recompute",
        f"activations are computed twice (recompute: {plan.recompute}{some}) to save memory, of which only "
        f"{peak / limit:.0%} is in use",
        {
            "forward_seconds": evidence.seconds["forward"],
            "step_seconds": evidence.step_seconds,
            "memory_peak_bytes": peak,
            "memory_limit_bytes": limit,
        },
        without,
        again,
        "high" if evidence.confidence == "high" and evidence.has_gpu else "medium",
        not_measured=(f"what activations would take: gradus plan {without} says it",),
    )


def near_memory_limit(evidence: Evidence) -> Finding | None:
    peak, limit = peak_bytes(evidence), limit_bytes(evidence)
    if not evidence.has_gpu or peak is None or not limit or peak < FULL * limit:
        return None
    plan = evidence.plan
    change = "--set plan.recompute=selective, or a smaller micro-batch"
    if plan is not None and plan.micro_batch > 1:
        change = f"--set plan.micro_batch={plan.micro_batch // 2} --set plan.accumulate={plan.accumulate * 2}"
    return Finding(
        "near-memory-limit",
        f"{peak / limit:.0%} of the GPU's memory is taken: a longer sample or a fragment more, and it dies",
        {"memory_peak_bytes": peak, "memory_limit_bytes": limit},
        change,
        None,
        "high",
        "waste",
    )


def fragmentation(evidence: Evidence) -> Finding | None:
    limit = limit_bytes(evidence)
    retries = [one.memory_retries for one in evidence.timings if one.memory_retries is not None]
    held = [
        one.memory_reserved_bytes - one.memory_peak_bytes
        for one in evidence.timings
        if one.memory_reserved_bytes is not None and one.memory_peak_bytes is not None
    ]
    peak = peak_bytes(evidence)
    in_pieces = bool(held and limit and peak) and max(held) > IN_PIECES * limit and peak > GROWS_TO * limit  # type: ignore[operator]
    if not evidence.has_gpu or not (max(retries, default=0) or in_pieces):
        return None
    return Finding(
        "fragmentation",
        "the allocator holds memory in pieces that do not fit"
        + (f", and had to give everything back {max(retries)} times" if max(retries, default=0) else ""),
        {
            "memory_retries": max(retries, default=0),
            "held_unused_bytes": max(held, default=None),
            "memory_limit_bytes": limit,
        },
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment of the run",
        None,
        "high" if max(retries, default=0) else "medium",
        "waste",
        not_measured=("the time that giving memory back took",),
    )


RULES = (memory_headroom, needless_recompute, near_memory_limit, fragmentation)
