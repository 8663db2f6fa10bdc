"""Search: the best plans for so many ranks, out of all that are worth a prediction. No torch.

The order of thought: one GPU, replicas, shards, tensor inside a node, pipeline, and only then what waits in host
memory. Memory comes first, because it is a quick question and most plans fail it; time is asked of what fits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from gradus.parallel.stages import bubble
from gradus.planner.choice.candidates import (
    MOST_STAGES_PER_RANK,
    Extras,
    Space,
    Split,
    candidates,
    complexity,
    micro_batches,
    with_micro_batch,
)
from gradus.planner.step_error import MEASURED_COMPILED
from gradus.schema.plan import Plan
from gradus.schema.prediction import MemoryPrediction, Verdict

MOST_CHOICES = 10
# What a more complex plan must gain over a simpler one: a share of a step. Short steps wait for the host, and of what
# that takes two milliseconds are no more than guessed; but a gain above the stated error of a step counts.
GAIN_WORTH_IT, GUESSED_SECONDS = 0.03, 0.002
MOST_PROMISING = 8  # that are looked at again, in all ways that they can run
MOST_SIZES = 3  # of micro-batches: mostly the largest that fits is the fastest, but in pipelines smaller ones idle less
# A micro-batch from which on matrices are large: nothing is recomputed just to make it larger.
SAMPLES_ENOUGH, TOKENS_ENOUGH = 8, 4096
TIERS = (
    Extras(),
    Extras(short_context=True, zero_3_in_pipelines=True, wide_weights=True),
    Extras(short_context=True, zero_3_in_pipelines=True, wide_weights=True, offload=True),
)


class Foresight(Protocol):
    """What the search asks about a plan."""

    @property
    def limit_bytes(self) -> int | None: ...

    def memory(self, plan: Plan) -> MemoryPrediction: ...

    def verdict(self, plan: Plan) -> Verdict: ...

    def host_bytes(self, plan: Plan) -> tuple[int, int]:
        """Of host memory, what a node needs and what it has."""

    def seconds(self, plan: Plan) -> float | None:
        """Of a step; None where the speed of the device is not known."""

    def least_bytes(self, plan: Plan) -> float:
        """What a rank certainly needs: quick to say, and below what `memory` will."""


@dataclass(frozen=True)
class Outcome:
    """What was found out about a plan."""

    plan: Plan
    verdict: Verdict
    seconds: float | None = None  # of a step; None: not known, or not asked because it does not fit
    least_bytes: float = 0.0  # that a rank needs certainly


@dataclass(frozen=True)
class Found:
    """The plans that can run, best first, and all that were looked at, in the order of thought."""

    ranked: list[Outcome]
    considered: list[Outcome]


def search(space: Space, foresight: Foresight, most: int = MOST_CHOICES) -> Found:
    considered: list[Outcome] = []
    for extras in TIERS:
        considered += looked_at(space, foresight, extras)
        if any(outcome.verdict == "fits" for outcome in considered):
            promising = ranked([_at_best(outcome) for outcome in considered], MOST_PROMISING)
            splits = {(outcome.plan.mesh, outcome.plan.zero) for outcome in promising}
            considered += looked_at(space, foresight, extras, splits=splits)
            break
    return Found(ranked(considered, most), considered)


def _at_best(outcome: Outcome) -> Outcome:
    """With the time that a pipeline would take if it hardly idled, as other schedules than the plainest may let it."""
    plan, seconds = outcome.plan, outcome.seconds
    if plan.mesh.pipeline == 1 or seconds is None:
        return outcome
    idle = bubble(plan.pipeline_schedule, plan.mesh.pipeline, plan.accumulate, plan.stages_per_rank)
    return replace(outcome, seconds=seconds * (1 + idle / MOST_STAGES_PER_RANK) / (1 + idle))


def something_fits(space: Space, foresight: Foresight, *, offload: bool = False) -> Plan | None:
    """The first plan in the order of thought that fits, whatever its speed."""
    for extras in TIERS if offload else TIERS[:2]:
        for outcome in looked_at(space, foresight, extras, first=True):
            if outcome.verdict == "fits":
                return outcome.plan
    return None


def looked_at(
    space: Space,
    foresight: Foresight,
    extras: Extras,
    *,
    splits: Collection[Split] | None = None,
    first: bool = False,
) -> list[Outcome]:
    """Each candidate with the micro-batches that are worth it; with `first`, untimed and only up to one that fits."""
    found: list[Outcome] = []
    enough: set[object] = set()  # ways to cut up that need no more recomputing
    for candidate in candidates(space, extras, splits):
        cut = candidate.model_copy(update={"recompute": "none"})
        key = cut.model_dump_json()
        if key in enough:
            continue
        outcomes = _sizes(space, foresight, candidate, timed=0 if first else 1 if splits is None else MOST_SIZES)
        found += outcomes
        fitting = [outcome.plan for outcome in outcomes if outcome.verdict == "fits"]
        if first and fitting:
            return found
        if any(_large(space, plan) for plan in fitting):
            enough.add(key)
    return found


def _sizes(space: Space, foresight: Foresight, candidate: Plan, *, timed: int) -> list[Outcome]:
    """A candidate with the largest micro-batch that fits, and smaller ones, so many of them as are to be timed."""
    plans = [with_micro_batch(space, candidate, size) for size in micro_batches(space, candidate)]
    if not plans:
        return []
    limit = foresight.limit_bytes
    least = foresight.least_bytes(plans[-1])
    if limit is not None and least > limit:
        return [Outcome(plans[-1], "no", least_bytes=least)]
    smallest = foresight.verdict(plans[-1])
    if smallest != "fits":
        seconds = foresight.seconds(plans[-1]) if timed and smallest == "tight" else None
        return [Outcome(plans[-1], smallest, seconds, least)]
    # What fits with one micro-batch fits with any smaller one.
    low, high = 0, len(plans) - 1
    while low < high:
        middle = (low + high) // 2
        if foresight.verdict(plans[middle]) == "fits":
            high = middle
        else:
            low = middle + 1
    return [
        Outcome(plan, "fits", foresight.seconds(plan) if timed else None, least)
        for plan in plans[low : low + max(1, timed)]
    ]


def _large(space: Space, plan: Plan) -> bool:
    """Whether a larger micro-batch would hardly compute any faster."""
    if plan.accumulate == 1:
        return True
    tokens = (space.case.model.sequence or 1) * plan.micro_batch / (plan.mesh.context * plan.mesh.tensor)
    return plan.micro_batch >= SAMPLES_ENOUGH or tokens >= TOKENS_ENOUGH


def ranked(outcomes: Iterable[Outcome], most: int = MOST_CHOICES) -> list[Outcome]:
    """The best of each way to cut up, the fastest first; a simpler one before it if it is nearly as fast.

    What fits comes before what is tight, however fast that is.
    """
    best: dict[object, Outcome] = {}
    for outcome in sorted((o for o in outcomes if o.verdict != "no"), key=_order):
        best.setdefault(_way(outcome.plan), outcome)
    rest = list(best.values())
    chosen: list[Outcome] = []
    while rest and len(chosen) < most:
        lead = rest[0]
        near = [other for other in rest if other.verdict == lead.verdict and _nearly_as_fast(other, lead)]
        chosen.append(min(near, key=lambda outcome: (complexity(outcome.plan), _order(outcome))))
        rest.remove(chosen[-1])
    # Within a way to cut up, too, less of everything is better than a gain that nobody would measure.
    everything = [outcome for outcome in outcomes if outcome.verdict != "no"]
    return [_simplest(outcome, everything) for outcome in chosen]


def _simplest(chosen: Outcome, outcomes: Iterable[Outcome]) -> Outcome:
    alike = [other for other in outcomes if _way(other.plan) == _way(chosen.plan) and other.verdict == chosen.verdict]
    near = [other for other in alike if _nearly_as_fast(other, chosen)]
    return min(near, key=lambda outcome: (complexity(outcome.plan), _order(outcome)))


def _order(outcome: Outcome) -> tuple[object, ...]:
    """The fastest first; where speed is not known, the simplest with the largest micro-batch."""
    plan = outcome.plan
    unknown = outcome.seconds is None
    return (
        outcome.verdict != "fits",
        outcome.seconds if outcome.seconds is not None else 0.0,
        complexity(plan) if unknown else 0,
        plan.zero,
        -plan.micro_batch,
        plan.recompute != "none",
    )


def _nearly_as_fast(other: Outcome, lead: Outcome) -> bool:
    if other.seconds is None or lead.seconds is None:
        return other is lead
    return other.seconds <= lead.seconds + gain_worth_it(lead.seconds)


def gain_worth_it(seconds: float) -> float:
    """Seconds of a step of this length that a simpler plan may take longer."""
    return max(GAIN_WORTH_IT * seconds, min(GUESSED_SECONDS, MEASURED_COMPILED * seconds))


def _way(plan: Plan) -> object:
    """What makes two plans different to a person who chooses between them."""
    mesh = plan.mesh
    return (mesh.pipeline, mesh.context, mesh.tensor, mesh.expert, plan.zero > 0, plan.offload, plan.activation_offload)
