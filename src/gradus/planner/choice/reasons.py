"""Reasons: why a plan is as it is, and why others are not, a sentence each, with the numbers. No torch.

A reason compares with what else was looked at: without this choice it would not fit, or be so much slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from gradus.parallel.case import reason_of
from gradus.planner.choice.candidates import (
    RECOMPUTE,
    Space,
    complexity,
    micro_batches,
    refusal,
    surroundings_of,
    with_micro_batch,
)
from gradus.planner.choice.search import GAIN_WORTH_IT, Foresight, Found, Outcome, gain_worth_it
from gradus.planner.defaults import reasons_of
from gradus.record.format import count_text
from gradus.schema.plan import Mesh, Plan

MOST_REFUSED = 6
DIMENSIONS = ("pipeline", "shard", "context", "tensor", "expert")


def gib(size: float) -> str:
    return f"{in_gib(size)} GiB"


def in_gib(size: float) -> str:
    """The number alone, with digits enough to compare it with another like it."""
    count = size / 2**30
    return f"{count:,.0f}" if count >= 1000 else f"{count:.1f}" if count >= 0.95 else f"{count:.2f}"


def _of_limit(foresight: Foresight) -> str:
    """What follows a size, where it is known how much there is."""
    return f" of {in_gib(foresight.limit_bytes)}" if foresight.limit_bytes is not None else ""


def reasons(
    outcome: Outcome, found: Found, space: Space, foresight: Foresight, settled: Plan | None = None
) -> dict[str, str]:
    """For each field of the plan that was chosen, why; `settled` is the plan with its levers, whose memory is told."""
    plan, mesh = outcome.plan, outcome.plan.mesh
    told = replace(outcome, plan=settled or plan)
    around = surroundings_of(space, plan)
    said: dict[str, str] = {name: why for name, (_, why) in around.items()}
    if around["narrow_weights"][0] and not plan.narrow_weights:
        narrow = plan.model_copy(update={"narrow_weights": True})
        said["narrow_weights"] = f"with copies in 16 bits it {too_large(narrow, foresight)}"
    said["mesh"] = _mesh(told, found, foresight)
    said["zero"] = _zero(outcome, found, foresight)
    if mesh.pipeline > 1:
        said["pipeline_schedule"] = _compared(
            outcome, found, foresight, lambda other: _schedule(other) != _schedule(plan), "another schedule"
        )
        said["stages_per_rank"] = f"{plan.stages_per_rank} on each rank, as {plan.pipeline_schedule} runs best here"
    said["micro_batch"] = _micro_batch(outcome, found, space, foresight)
    ranks = mesh.data_ranks
    said["accumulate"] = f"batch {space.recipe.batch} over {count_text(ranks, 'data rank')}"
    said["recompute"] = _recompute(told, found, space, foresight)
    if plan.offload != "none":
        said["offload"] = "nothing that keeps all state on the GPUs fits"
    if plan.activation_offload:
        said["activation_offload"] = "nothing that keeps all activations on the GPUs fits"
    order = ("mesh", "zero", "micro_batch", "accumulate", "recompute")
    said = {name: said[name] for name in order} | said
    return reasons_of({name: (None, why) for name, why in said.items()}, space.recipe)


def refused(found: Found, space: Space, foresight: Foresight) -> list[dict[str, str]]:
    """What a person would have thought of first, and why it is not what was chosen."""
    best = found.ranked[0] if found.ranked else None
    said: list[dict[str, str]] = []
    shown: set[object] = {_shape(outcome.plan) for outcome in found.ranked}
    for outcome in sorted(found.considered, key=lambda outcome: complexity(outcome.plan)):
        shape = _shape(outcome.plan)
        if shape in shown or len(said) == MOST_REFUSED:
            continue
        shown.add(shape)
        alike = [other for other in found.considered if _shape(other.plan) == shape]
        nearest = _best(alike)
        if nearest.verdict == "no":
            said.append({"plan": title(nearest.plan), "reason": too_large(nearest.plan, foresight)})
        elif best is not None and nearest.seconds and best.seconds:
            said.append({"plan": title(nearest.plan), "reason": _not_as_good(nearest, best, foresight)})
    return said + _against_the_rules(space)[: MOST_REFUSED - len(said)]


def _not_as_good(other: Outcome, best: Outcome, foresight: Foresight) -> str:
    """Why the best comes before what can run too, and may even be faster."""
    assert other.seconds is not None
    assert best.seconds is not None
    step, more = f"{other.seconds:.3g} s a step", other.seconds / best.seconds - 1
    if other.verdict == "tight" and best.verdict == "fits":
        limit = _of_limit(foresight)
        faster = f", {-more:.0%} faster" if more < -0.005 else ""
        return f"{step}{faster}, but memory is tight: {gib(foresight.memory(other.plan).peak)}{limit}"
    if more < -0.0005:
        return f"{step}, {-more:.1%} faster, but more parts: {_too_little(other.seconds)}"
    return f"{step}, {max(more, 0):.0%} more than the best"


def _too_little(seconds: float) -> str:
    """What a step of this length would have to gain."""
    share = gain_worth_it(seconds) / seconds
    return f"below {share:.0%} they are not worth it" + (" in so short a step" if share > GAIN_WORTH_IT else "")


def too_large(plan: Plan, foresight: Foresight) -> str:
    """`needs 31.2 GiB of 24.0: optimizer 19.1`."""
    memory = foresight.memory(plan)
    kinds = {name: getattr(memory, name) for name in type(memory).model_fields}
    largest = max(kinds, key=lambda name: kinds[name])
    return f"needs {gib(memory.peak)}{_of_limit(foresight)}: {largest.replace('_', ' ')} {in_gib(kinds[largest])}"


def title(plan: Plan) -> str:
    """A plan in a few words."""
    words = [str(plan.mesh)]
    words += [f"zero {plan.zero}"] if plan.zero else []
    words += [f"{plan.recompute} recompute"] if plan.recompute != "none" else []
    words += ["offload"] if plan.offload != "none" else []
    words += ["activation offload"] if plan.activation_offload else []
    words += [f"micro-batch {plan.micro_batch}"]
    return ", ".join(words)


# --- fields


def _mesh(outcome: Outcome, found: Found, foresight: Foresight) -> str:
    plan, mesh = outcome.plan, outcome.plan.mesh
    if mesh.world_size == 1:
        return "one rank"
    peak, limit = foresight.memory(plan).peak, foresight.limit_bytes
    if mesh.replicate == mesh.world_size:
        of = f": {gib(peak)} of {in_gib(limit)}" if limit is not None else ""
        return f"{mesh.replicate} ranks, each with the whole model{of}"
    said = []
    for name in DIMENSIONS:
        ways = getattr(mesh, name)
        if ways > 1:
            why = _compared(outcome, found, foresight, _undivided(name), "without it")
            said.append(f"{name} {ways}: {why}")
    return "; ".join(said)


def _undivided(name: str) -> Callable[[Plan], bool]:
    return lambda plan: bool(getattr(plan.mesh, name) == 1)


def _zero(outcome: Outcome, found: Found, foresight: Foresight) -> str:
    plan = outcome.plan
    if plan.zero == 0:
        return "nothing is sharded: mesh.shard is 1"
    over = f"zero {plan.zero} over {plan.mesh.shards}"

    def cut_alike(other: Plan) -> bool:
        return (other.mesh.tensor, other.mesh.pipeline) == (plan.mesh.tensor, plan.mesh.pipeline)

    replicas = [o for o in found.considered if o.plan.mesh.shard == 1 and cut_alike(o.plan)]
    if replicas and all(o.verdict == "no" for o in replicas):
        least = min(foresight.memory(o.plan).peak for o in replicas)
        limit = _of_limit(foresight)
        return f"{over}: replicas need {gib(least)}{limit}"
    other = _compared(outcome, found, foresight, lambda p: p.zero != plan.zero and cut_alike(p), "otherwise")
    return f"{over}: {other}"


def _micro_batch(outcome: Outcome, found: Found, space: Space, foresight: Foresight) -> str:
    plan = outcome.plan
    sizes = micro_batches(space, plan)
    larger = min((size for size in sizes if size > plan.micro_batch), default=None)
    if larger is None:
        share = space.recipe.batch // plan.mesh.data_ranks
        if plan.micro_batch == share:
            return f"all {share} samples of a rank at once"
        return f"the largest that leaves {plan.accumulate} micro-batches for {plan.mesh.pipeline} stages"
    with_larger = with_micro_batch(space, plan, larger)
    limit = foresight.limit_bytes
    if foresight.verdict(with_larger) != "fits" and limit is not None:
        return f"{larger} would need {gib(foresight.memory(with_larger).peak)} of {in_gib(limit)}"
    seconds = foresight.seconds(with_larger)
    if seconds and outcome.seconds:
        return f"{larger} would take {seconds:.3g} s a step, {plan.micro_batch} takes {outcome.seconds:.3g}"
    return f"batch {space.recipe.batch} over {plan.mesh.data_ranks} data ranks"


def _recompute(outcome: Outcome, found: Found, space: Space, foresight: Foresight) -> str:
    plan = outcome.plan
    peak, limit = foresight.memory(plan).peak, foresight.limit_bytes
    if plan.recompute == "none":
        return f"fits without: {gib(peak)} of {in_gib(limit)}" if limit is not None else "no limit is known"
    if "recompute_blocks" in space.fixed:
        why = f"recompute_blocks is {plan.recompute_blocks}, so that some are recomputed"
        if plan.recompute == "selective":
            return f"{why}; selective costs least"
        return f"{why}; {_compared(outcome, found, foresight, lambda o: o.recompute == 'selective', 'selective')}"
    without = plan.model_copy(update={"recompute": "none", "recompute_blocks": None})
    if limit is not None and foresight.verdict(without) != "fits":
        return f"without it {gib(foresight.memory(without).peak)} of {in_gib(limit)}"
    return _compared(outcome, found, foresight, lambda other: other.recompute == "none", "without it")


def _compared(outcome: Outcome, found: Found, foresight: Foresight, other: Callable[[Plan], bool], what: str) -> str:
    """The choice against the best that was found without it."""
    others = [o for o in found.considered if other(o.plan)]
    if not others:
        return "the only way that was looked at"
    best = _best(others)
    limit = _of_limit(foresight)
    if best.verdict == "no":
        return f"{what} at least {gib(foresight.memory(best.plan).peak)}{limit}"
    if best.verdict == "tight" and outcome.verdict == "fits":
        return f"{what} {gib(foresight.memory(best.plan).peak)}{limit}, which is tight"
    if best.seconds is None or outcome.seconds is None:
        return f"simpler than {title(best.plan)}"
    gain = best.seconds / outcome.seconds - 1
    if abs(gain) < 0.005:
        return f"{what} ({title(best.plan)}) no faster"
    if gain < 0:
        return f"{what} ({title(best.plan)}) {-gain:.1%} faster, but more parts: {_too_little(best.seconds)}"
    return f"{what} ({title(best.plan)}) {gain:.0%} slower"


def _best(outcomes: Iterable[Outcome]) -> Outcome:
    """What fits before what is tight, then the fastest; of what does not fit, that which needs least."""
    order = {"fits": 0, "tight": 1, "no": 2}
    return min(
        outcomes,
        key=lambda o: (
            order[o.verdict],
            o.seconds if o.seconds is not None else 0.0,
            o.least_bytes if o.verdict == "no" else 0.0,
            -RECOMPUTE.index(o.plan.recompute) if o.verdict == "no" else 0,
        ),
    )


def _against_the_rules(space: Space) -> list[dict[str, str]]:
    """Ways to split that this model or device does not take, in the words of the rule."""
    if "mesh" in space.fixed or space.ranks == 1:
        return []
    said = []
    for mesh in (Mesh(shard=2), Mesh(tensor=2), Mesh(pipeline=2)):
        plan = Plan(
            mesh=mesh,
            zero=3 if mesh.shard > 1 else 0,
            accumulate=2 if mesh.pipeline > 1 else 1,
            precision="bf16",
            sequence_parallel=False,
        )
        found = refusal(space, plan, without=("precision, device", "pipeline, micro-batches"))
        if found is not None:
            said.append({"plan": str(mesh), "reason": reason_of(found)})
    return said


def _schedule(plan: Plan) -> Any:
    return plan.pipeline_schedule, plan.stages_per_rank


def _shape(plan: Plan) -> object:
    mesh = plan.mesh
    return tuple(getattr(mesh, name) > 1 for name in ("replicate", *DIMENSIONS)), plan.offload, plan.activation_offload
