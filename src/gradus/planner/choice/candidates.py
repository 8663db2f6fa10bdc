"""Candidates: the ways to cut a recipe up over so many ranks that are worth a prediction. No torch.

What cannot be is left out by the rules that also refuse it in a recipe; what is never better than something simpler,
by the rules here, each with its reason. What the recipe fixes stays. A candidate is a plan whose micro-batch is still
open: `micro_batches` has those that it may get.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gradus.parallel.case import Case
from gradus.parallel.split_rules import micro_batches_fit
from gradus.parallel.support import RULES
from gradus.planner.defaults import Chosen, case_of, ranks_on_a_node, surroundings
from gradus.planner.profile.program import ModelProfile
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

LONG_SEQUENCE = 8192  # tokens of a sample from which on its context is divided although the rest would fit
UNEVEN = 1.25  # stages may be so much longer than the mean: the rest of the pipeline waits for the longest
MOST_STAGES_PER_RANK = 4  # more of them send activations around for ever less idle time
MOST_MICRO_BATCHES = 16  # sizes that are looked at, the largest first
TOKENS = 16384  # of a micro-batch in a pipeline: more of them compute no faster, and fewer idle less
RECOMPUTE = ("none", "selective", "full")  # from what costs least
ABOUT_THE_SPLIT = (
    "pipeline, micro-batches",
    "batch normalisation, accumulate",
    "compression, sharded and accumulating",
)


@dataclass(frozen=True)
class Space:
    """What is chosen from: everything that is the same for all candidates."""

    recipe: Recipe
    cluster: Cluster
    ranks: int
    case: Case
    tensor_divisors: tuple[int, ...] = ()  # numbers that tensor must divide, as far as a trace tells
    divides: bool = True  # whether the trace has layers that tensor divides
    takes_narrow: bool = False  # the model was traced with weights in 16 bits

    @property
    def fixed(self) -> dict[str, Any]:
        return {name: getattr(self.recipe.plan, name) for name in self.recipe.plan.fixed}


Split = tuple[Mesh, int]  # a mesh and what is sharded over it: zero


@dataclass(frozen=True)
class Extras:
    """What is only thought of when nothing fits without it."""

    short_context: bool = False  # dividing the context of samples that are not long
    zero_3_in_pipelines: bool = False
    wide_weights: bool = False  # computing with the parameters themselves, without copies in 16 bits beside them
    offload: bool = False


PLAIN = Extras()


def space_of(
    recipe: Recipe,
    cluster: Cluster,
    ranks: int,
    profile: ModelProfile | None,
    *,
    takes_narrow: bool = False,
    narrow_failure: str = "",
) -> Space:
    case = case_of(recipe, cluster, Plan())
    case = replace(case, model=replace(case.model, narrow_failure=narrow_failure))
    if profile is not None and profile.class_name and case.model.kind == "user":
        case = replace(case, model=replace(case.model, name=profile.class_name))  # not of a function that builds it
    if profile is None or not profile.traced:
        return Space(recipe, cluster, ranks, case, takes_narrow=takes_narrow)
    heads = {
        round(number.fixed)
        for part in profile.parts
        for operator in part.forward
        if operator.kind == "attention" and operator.divides == "tensor" and len(operator.shape) >= 3
        for number in operator.shape[1:3]
    }
    divides = any(weights.divides == "tensor" for part in profile.parts for weights in part.weights)
    case = replace(case, model=replace(case.model, blocks=case.model.blocks or len(profile.blocks) or None))
    return Space(recipe, cluster, ranks, case, tuple(sorted(heads - {0})), divides, takes_narrow)


def refusal(space: Space, plan: Plan, *, without: tuple[str, ...] = ()) -> InputError | None:
    """Why a plan cannot be, by the rules of what can be combined; those named in `without` are left out."""
    case = replace(space.case, plan=plan)
    for name, rule in RULES.items():
        if name not in without:
            found = rule(case)
            if found is not None:
                return found
    return None


def candidates(space: Space, extras: Extras = PLAIN, splits: Collection[Split] | None = None) -> Iterator[Plan]:
    """Plans with micro_batch 1, which is yet to be chosen, in the order of thought: the simplest meshes first.

    A first look takes the plainest schedule of a pipeline. With `splits`, only these, in all ways that they can run.
    """
    around: dict[object, dict[str, Any]] = {}
    for mesh in meshes(space, extras):
        for zero in _zeros(space, mesh, extras):
            if splits is not None and (mesh, zero) not in splits:
                continue
            for schedule, stages in _schedules(space, mesh, few=splits is None):
                choice = {"mesh": mesh, "zero": zero, "pipeline_schedule": schedule, "stages_per_rank": stages}
                plan = Plan().model_copy(update=choice | space.fixed)
                alike = (mesh.pipeline > 1, plan.pipeline_schedule, plan.sharded, mesh.world_size == 1)
                if alike not in around:
                    around[alike] = completed(space, plan)
                plan = plan.model_copy(update=around[alike])
                weights = (True, False) if plan.narrow_weights and extras.wide_weights else (plan.narrow_weights,)
                for narrow in _choices(space, "narrow_weights", weights):
                    for recompute in _choices(space, "recompute", RECOMPUTE):
                        for host in _on_host(space, plan, extras):
                            choice = {"narrow_weights": narrow, "recompute": recompute, **host}
                            candidate = plan.model_copy(update=choice)
                            if refusal(space, candidate, without=ABOUT_THE_SPLIT) is None:
                                yield candidate


def completed(space: Space, split: Plan) -> dict[str, Any]:
    """What the rest of a plan is to be that cuts the work up in this way."""
    chosen = surroundings_of(space, split)
    return {name: value for name, (value, _) in chosen.items()} | space.fixed


def surroundings_of(space: Space, split: Plan) -> dict[str, Chosen]:
    model = space.case.model
    return surroundings(
        space.recipe, space.cluster, split, takes_narrow=space.takes_narrow, narrow_failure=model.narrow_failure
    )


def meshes(space: Space, extras: Extras = PLAIN) -> list[Mesh]:
    """Shapes of all ranks over which the batch can be shared, the simplest first."""
    if "mesh" in space.fixed:
        return [space.recipe.plan.mesh]
    found = []
    for tensor in _tensor(space):
        for context in _context(space, tensor, extras):
            for pipeline in _pipeline(space, space.ranks // (tensor * context)):
                data = space.ranks // (tensor * context * pipeline)
                for replicate, shard in _data_splits(space, data, context * tensor, plain=pipeline > 1):
                    if space.recipe.batch % (replicate * shard):
                        continue
                    for expert in _experts(space, shard * context):
                        ways = {"replicate": replicate, "pipeline": pipeline, "shard": shard}
                        found.append(Mesh(**ways, context=context, tensor=tensor, expert=expert))
    return sorted(found, key=lambda mesh: (complexity(Plan.model_construct(mesh=mesh)), str(mesh)))


def micro_batches(space: Space, plan: Plan) -> list[int]:
    """Sizes of a micro-batch that the plan may get, the largest first."""
    share, rest = divmod(space.recipe.batch, plan.mesh.data_ranks)
    if rest:
        return []
    fixed = space.fixed
    if "micro_batch" in fixed:
        sizes = [fixed["micro_batch"]]
    elif "accumulate" in fixed:
        sizes = [share // fixed["accumulate"]]
    else:
        sizes = [size for size in range(share, 0, -1) if share % size == 0]
    said = "micro_batch" in fixed or "accumulate" in fixed
    fitting = []
    for size in sizes:
        if not size or share % size or ("accumulate" in fixed and size * fixed["accumulate"] != share):
            continue
        cut = with_micro_batch(space, plan, size)
        # A pipeline of fewer micro-batches than stages idles for most of a step.
        idle = plan.mesh.pipeline > 1 and (cut.accumulate < plan.mesh.pipeline or not micro_batches_fit(cut))
        larger_than_pays = plan.mesh.pipeline > 1 and size > 1 and size * (space.case.model.sequence or 1) > TOKENS
        if (said or not (idle or larger_than_pays)) and refusal(space, cut) is None:
            fitting.append(size)
    return _thinned(fitting)


def with_micro_batch(space: Space, plan: Plan, size: int) -> Plan:
    share = space.recipe.batch // plan.mesh.data_ranks
    return plan.model_copy(update={"micro_batch": size, "accumulate": share // size})


def complexity(plan: Plan) -> int:
    """How much has to work together, in the order of thought: a plan with a lower number is preferred.

    One GPU, replicas, shards, shards inside replicas, tensor, context, pipeline, offload; of each, less before more.
    """
    mesh = plan.mesh
    levels = (
        (mesh.replicate > 1, 1),
        (mesh.shard > 1, 2 + (plan.zero == 3)),
        (mesh.expert > 1, 2),
        (mesh.tensor > 1, 5),
        (mesh.context > 1, 6),
        (mesh.pipeline > 1, 8),
        (mesh.pipeline > 1 and plan.pipeline_schedule in ("interleaved", "zero-bubble"), 1),
        (plan.recompute != "none", 1),
        (plan.activation_offload, 10),
        (plan.offload != "none", 12),
    )
    return sum(weight for used, weight in levels if used)


def waits_on_host(plan: Plan) -> bool:
    """Whether something that a step needs is in host memory."""
    return plan.offload != "none" or plan.activation_offload


# --- one dimension after another


def _tensor(space: Space) -> list[int]:
    """Inside a node only: its collectives are waited for in every layer."""
    on_a_node = ranks_on_a_node(space.cluster, Plan(ranks_per_gpu=space.recipe.plan.ranks_per_gpu))
    ways = [n for n in _divisors(math.gcd(space.ranks, on_a_node)) if all(h % n == 0 for h in space.tensor_divisors)]
    if not space.divides:
        return [1]
    return [n for n in ways if n == 1 or _legal(space, Mesh(tensor=n))]


def _context(space: Space, tensor: int, extras: Extras) -> list[int]:
    """Only where samples are long, and no shorter than a rank keeps busy with; reference models only.

    Whether the attention of a model of the user's own can be divided is only seen when it is there.
    """
    length = space.case.model.sequence
    if space.case.model.kind != "reference" or length is None:
        return [1]
    shortest = 1024 if extras.short_context else LONG_SEQUENCE
    ways = [n for n in _divisors(space.ranks // tensor) if n == 1 or length // n >= shortest // 2]
    ways = [n for n in ways if n <= 32]
    return [n for n in ways if n == 1 or (length >= shortest and _legal(space, Mesh(context=n)))]


def _pipeline(space: Space, ranks: int) -> list[int]:
    blocks = space.case.model.blocks
    if blocks is None:
        return [1]
    ways = [n for n in _divisors(ranks) if n == 1 or _evenly(blocks, n)]
    return [n for n in ways if n == 1 or _legal(space, Mesh(pipeline=n), accumulate=n)]


def _data_splits(space: Space, ranks: int, inner: int, *, plain: bool) -> list[tuple[int, int]]:
    """Replicas and shards. In between, only shards that fill one, two or four nodes: less goes between nodes then."""
    zero = space.fixed.get("zero")
    if ranks == 1:
        return [(1, 1)] if not zero else []
    splits = [] if zero else [(ranks, 1)]
    if zero != 0:
        splits.append((1, ranks))
    if zero != 0 and not plain:
        on_a_node = ranks_on_a_node(space.cluster, Plan(ranks_per_gpu=space.recipe.plan.ranks_per_gpu))
        fills = [on_a_node * nodes // inner for nodes in (1, 2, 4) if on_a_node * nodes % inner == 0]
        splits += [(ranks // shard, shard) for shard in fills if 1 < shard < ranks and ranks % shard == 0]
    return splits


def _experts(space: Space, ranks: int) -> list[int]:
    """All of them on each rank, or spread over a node, or over as many ranks as there are experts."""
    experts = space.case.model.experts
    if not experts or ranks == 1:
        return [1]
    on_a_node = ranks_on_a_node(space.cluster, Plan())
    ways = [n for n in _divisors(math.gcd(experts, ranks)) if n > 1]
    inside = [n for n in ways if n <= on_a_node]
    return sorted({1, *inside[-1:], *ways[-1:]})


def _zeros(space: Space, mesh: Mesh, extras: Extras) -> list[int]:
    if "zero" in space.fixed:
        return [space.fixed["zero"]]
    if mesh.shard == 1:
        return [0]
    if mesh.pipeline > 1:  # which reduces gradients once, at its end: 2 saves no more, and 3 gathers more often
        return [1, 3] if extras.zero_3_in_pipelines else [1]
    return [3] if mesh.replicate > 1 else [1, 2, 3]  # shards inside a node pay where they are gathered often


def _schedules(space: Space, mesh: Mesh, *, few: bool) -> list[tuple[str, int]]:
    fixed = space.fixed
    if mesh.pipeline == 1:
        return [(fixed.get("pipeline_schedule", "1f1b"), fixed.get("stages_per_rank", 1))]
    blocks = space.case.model.blocks or mesh.pipeline
    several = [v for v in range(2, MOST_STAGES_PER_RANK + 1) if _evenly(blocks, mesh.pipeline * v)]
    found = [("1f1b", 1), *([] if few else [*(("interleaved", v) for v in several), ("zero-bubble", 1)])]
    if "pipeline_schedule" in fixed:
        only = fixed["pipeline_schedule"]
        found = [pair for pair in found if pair[0] == only] or [(only, 1 if only in ("gpipe", "1f1b") else 2)]
    if "stages_per_rank" in fixed:
        found = list(dict.fromkeys((schedule, fixed["stages_per_rank"]) for schedule, _ in found))
    return found


def _on_host(space: Space, plan: Plan, extras: Extras) -> list[dict[str, Any]]:
    if not extras.offload:
        return [{}]
    options: list[dict[str, Any]] = []
    for offload in _choices(space, "offload", ("none", "cpu") if plan.zero else ("none",)):
        for activations in _choices(space, "activation_offload", (False, True)):
            if offload != "none" or activations:
                options.append({"offload": offload, "activation_offload": activations})
    return options


def _choices(space: Space, field: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    return (space.fixed[field],) if field in space.fixed else values


def _legal(space: Space, mesh: Mesh, accumulate: int = 1) -> bool:
    """Whether one dimension alone is allowed, whatever the rest will be."""
    plan = Plan(mesh=mesh, accumulate=accumulate, sequence_parallel=False)
    precision = surroundings(space.recipe, space.cluster, plan)["precision"][0]
    plan = plan.model_copy(update={"precision": space.fixed.get("precision", precision)})
    return refusal(space, plan, without=ABOUT_THE_SPLIT) is None


def _evenly(blocks: int, stages: int) -> bool:
    return stages <= blocks and math.ceil(blocks / stages) * stages <= UNEVEN * blocks


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _thinned(sizes: list[int]) -> list[int]:
    """At most so many, evenly over the list, the ends included."""
    if len(sizes) <= MOST_MICRO_BATCHES:
        return sizes
    step = (len(sizes) - 1) / (MOST_MICRO_BATCHES - 1)
    return [sizes[round(step * number)] for number in range(MOST_MICRO_BATCHES)]
