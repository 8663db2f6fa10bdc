"""Pipeline: ranks that idle because there are few micro-batches, or because one stage has more to do than others."""

from __future__ import annotations

from statistics import mean

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Finding
from gradus.schema.plan import Plan

# Four micro-batches to a stage, which is the usual advice, idle for less than a fifth of the step.
BUBBLE_SHARE = 0.25
# Of the stages' mean: embedding and output make the first and the last one differ a little in any model.
UNBALANCED = 1.25
LEAST_SHARE = 0.1  # of the step, that balance would save
MICRO_BATCHES_PER_STAGE = 4


def bubble_share(plan: Plan) -> float:
    """Of a step, that a rank idles while the pipeline fills and drains: (p-1) / (v·m + p-1). Zero-bubble fills it."""
    if plan.mesh.pipeline == 1:
        return 0.0
    if plan.pipeline_schedule == "zero-bubble" and plan.accumulate >= plan.mesh.pipeline:
        return 0.0
    ahead = plan.mesh.pipeline - 1
    return ahead / (plan.stages_per_rank * plan.accumulate + ahead)


def pipeline_bubble(evidence: Evidence) -> Finding | None:
    plan = evidence.plan
    if plan is None or bubble_share(plan) < BUBBLE_SHARE:
        return None
    expected = bubble_share(plan)
    stages, now = plan.mesh.pipeline, plan.accumulate
    wanted, smaller = _finer(plan, MICRO_BATCHES_PER_STAGE * stages)
    change = f"--set plan.accumulate={wanted} --set plan.micro_batch={smaller}"
    if wanted == now:
        change = "a larger batch with more micro-batches, or --set plan.pipeline_schedule=interleaved"
    facts = {
        "bubble_share": expected,
        "stages": stages,
        "micro_batches": now,
        "schedule": plan.pipeline_schedule,
    }
    missing: tuple[str, ...] = ("how long ranks really waited",)
    gain = expected
    if evidence.step_seconds:
        waits = min(evidence.by_rank("exposed_communication").values())
        facts |= {"step_seconds": evidence.step_seconds, "waiting_seconds": waits}
        # What every rank waits for at least is the most that filling the pipeline could bring.
        gain, missing = min(expected, waits / evidence.step_seconds), ()
        if gain < LEAST_SHARE:
            return None
    return Finding(
        "pipeline-bubble",
        f"{stages} stages with {now} micro-batch{'es' if now > 1 else ''} idle for {expected:.0%} of a step "
        "while the pipeline fills and drains",
        facts,
        change,
        gain,
        evidence.confidence if evidence.timings else "medium",
        not_measured=missing,
    )


def _finer(plan: Plan, wanted: int) -> tuple[int, int]:
    """More micro-batches from the same batch: their number and size."""
    share = plan.micro_batch * plan.accumulate
    finer = [count for count in range(plan.accumulate, share + 1) if share % count == 0 and count <= wanted]
    count = max(finer, default=plan.accumulate)
    return count, share // count


def unbalanced_pipeline(evidence: Evidence) -> Finding | None:
    plan, step = evidence.plan, evidence.judged_step_seconds
    if plan is None or plan.mesh.pipeline == 1 or not step:
        return None
    by_stage: dict[int, list[float]] = {}
    for rank, seconds in evidence.own_seconds.items():
        by_stage.setdefault(stage_of(plan, rank), []).append(seconds)
    if len(by_stage) < plan.mesh.pipeline:
        return None
    stages = {stage: mean(found) for stage, found in sorted(by_stage.items())}
    usual, slowest = mean(stages.values()), max(stages, key=lambda stage: stages[stage])
    excess = stages[slowest] - usual
    if stages[slowest] < UNBALANCED * usual or excess < LEAST_SHARE * step:
        return None
    change = (
        f"fewer blocks in stage {slowest}: --set plan.stage_blocks with how many each stage is to have, first to last"
    )
    if plan.stage_blocks is not None:
        change = "leave out plan.stage_blocks: stages are then balanced by cost"
        even = _even(plan.stage_blocks)
        change += f"; or --set 'plan.stage_blocks={even}'" if even else ""
    return Finding(
        "unbalanced-pipeline",
        f"stage {slowest} of {plan.mesh.pipeline} works {stages[slowest] / usual:.1f} times as long as the mean stage, "
        "and the others wait for it",
        {
            "own_seconds_by_stage": {f"stage {stage}": round(seconds, 6) for stage, seconds in stages.items()},
            "step_seconds": step,
            "stage_blocks": plan.stage_blocks,
        },
        change,
        min(1.0, excess / step),
        evidence.confidence,
    )


def stage_of(plan: Plan, rank: int) -> int:
    """By the order of the mesh: replicate, pipeline, shard, context, tensor."""
    inside = plan.mesh.shard * plan.mesh.context * plan.mesh.tensor
    return rank // inside % plan.mesh.pipeline


def _even(blocks: list[int]) -> list[int] | None:
    """As many blocks, spread evenly; None if they are."""
    each, more = divmod(sum(blocks), len(blocks))
    even = [each + (place < more) for place in range(len(blocks))]
    return even if even != blocks else None


RULES = (pipeline_bubble, unbalanced_pipeline)
