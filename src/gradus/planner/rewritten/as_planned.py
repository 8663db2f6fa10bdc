"""As planned: a part of a model as it runs under a plan, with what is recomputed and what is compiled. No torch."""

from __future__ import annotations

from gradus.planner.profile.program import ModelProfile, Part
from gradus.planner.rewritten.rewriting import compiled, recomputed
from gradus.schema.plan import Plan


def as_planned(profile: ModelProfile, number: int, plan: Plan) -> Part:
    """Part `number` of the profile. Recompute is for blocks that are not spared; a model without blocks is one."""
    part = profile.parts[number]
    if not part.spared and (part.block or not any(other.block for other in profile.parts)):
        part = recomputed(part, plan.recompute)
    return compiled(part) if plan.compile else part
