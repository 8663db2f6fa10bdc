"""Staging: which calls of a profile's parts each stage of a pipeline makes. No torch."""

from __future__ import annotations

import functools

from gradus.parallel.stages import balanced, check_enough_blocks, ranges
from gradus.planner.profile.program import ModelProfile
from gradus.schema.plan import Plan

# Above so many steps of looking for the best cut, blocks that are alike are dealt out directly. It finds cuts that are
# as good; where several are, it may take another one.
_MOST_STEPS = 20_000


def staged_calls(profile: ModelProfile, plan: Plan) -> list[list[int]]:
    """For each stage, first to last, the parts that it calls in forward, by number: all that lies between blocks goes
    with the block before it."""
    calls = list(profile.calls)
    places = [place for place, number in enumerate(calls) if profile.parts[number].block]
    stages = plan.mesh.pipeline * plan.stages_per_rank
    if stages == 1:
        return [calls]
    check_enough_blocks(len(places), plan.mesh.pipeline, plan.stages_per_rank, plan.stage_blocks)
    flops = [sum(op.flops.at(1) for op in part.forward) for part in profile.parts]
    costs = tuple(flops[calls[place]] for place in places)
    before = sum(flops[number] for number in calls[: places[0]])
    after = sum(flops[number] for number in calls[places[-1] + 1 :])
    counts = plan.stage_blocks or stage_counts(costs, stages, before, after)
    starts = [places[span.start] for span in ranges(counts)]
    starts[0] = 0
    return [calls[start:end] for start, end in zip(starts, [*starts[1:], len(calls)], strict=True)]


@functools.lru_cache(maxsize=256)
def stage_counts(costs: tuple[float, ...], stages: int, before: float, after: float) -> tuple[int, ...]:
    """Blocks of each stage, so that the slowest is as fast as can be."""
    if stages * len(costs) ** 2 / 2 <= _MOST_STEPS or len(set(costs)) > 1:
        return tuple(balanced(costs, stages, before=before, after=after))
    loads = [before, *[0.0] * (stages - 2), after]
    counts = [1] * stages
    loads = [load + costs[0] for load in loads]
    for _ in range(len(costs) - stages):
        lightest = min(range(stages), key=loads.__getitem__)
        counts[lightest] += 1
        loads[lightest] += costs[0]
    return tuple(counts)
