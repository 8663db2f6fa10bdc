"""Levers: what makes a step faster and is decided when its split is: loss_chunks, recompute_blocks, cuda_graph.

All follow from the micro-batch, so that they are chosen for plans that a search has found, and not searched for; then
one GPU is asked for a larger micro-batch once more, in the room that they make. No torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from gradus.parallel.case import reason_of
from gradus.parallel.support import LOSS_KERNEL_CAPABILITY, RULES
from gradus.planner.choice.candidates import RECOMPUTE, Space, micro_batches, refusal, with_micro_batch
from gradus.planner.choice.reasons import gib, in_gib
from gradus.planner.choice.search import Foresight, gain_worth_it
from gradus.planner.defaults import Chosen
from gradus.planner.profile.program import ModelProfile
from gradus.planner.profile.request import NARROW
from gradus.record.format import count_text
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan

# Logits from which on they are computed in parts, and what a part may have. On an H200 four parts of GPT-2's 3.1 GiB
# took 3.0 ms of a step, all at once 4.3; parts of fewer tokens are small matrices. Fewer parts were not measured.
CHUNK_BYTES, LEAST_CHUNK_TOKENS, LEAST_CHUNKS = 2**30, 2048, 4
LOGIT_BYTES = 2  # of 16 bits
# Below this, rows are too short for the kernel, which gives each one to a whole program: it was made for vocabularies.
LEAST_COLUMNS = 4096
# Of the device's memory: a recorded step keeps what it needs, and an evaluation needs some besides.
MOST_RECORDED = 0.6
NOTICED = 0.01  # of a step: waiting for less is not worth a number


class Tracing(Foresight, Protocol):
    """What is asked about plans here besides."""

    def trace(self) -> ModelProfile: ...

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Trace what these plans are predicted from; an InputError where one of them cannot be."""

    def launching_seconds(self, plan: Plan) -> float:
        """Of a step, that the device waits for the host to launch its work."""


Settled = tuple[Plan, dict[str, str]]  # a plan, and why its levers are as they are


def settled(plans: Sequence[Plan], space: Space, foresight: Tracing) -> list[Settled]:
    """Plans that a search has found, with their levers; what the recipe fixes stays.

    What they save is not known of a model that could not be traced.
    """
    if not foresight.trace().traced:
        return [(plan, {}) for plan in plans]
    found = []
    for chunked in _with_loss_chunks(plans, space, foresight):
        fewer = _and(chunked, with_fewer_blocks(chunked[0], space, foresight))
        larger = with_larger_micro_batch(fewer, space, foresight)
        found.append(_and(larger, with_cuda_graph(larger[0], space, foresight)))
    return found


def _and(first: Settled, then: Settled) -> Settled:
    return then[0], first[1] | then[1]


# --- loss_chunks


def _with_loss_chunks(plans: Sequence[Plan], space: Space, foresight: Tracing) -> list[Settled]:
    found = []
    for plan, chosen in zip(plans, _loss_chunks(plans, space, foresight), strict=True):
        chunked = plan.model_copy(update={name: value for name, (value, _) in chosen.items()})
        found.append((chunked, {name: why for name, (_, why) in chosen.items()}))
    return found


def chunks_of(tokens: float, vocabulary: int | None) -> int:
    """How many parts the logits of so many tokens are computed in: the smallest power of two with small parts."""
    logits = tokens * (vocabulary or 0) * LOGIT_BYTES
    if logits <= CHUNK_BYTES:
        return 1
    chunks = 1
    while chunks < LEAST_CHUNKS or logits > CHUNK_BYTES * chunks:
        if tokens < LEAST_CHUNK_TOKENS * 2 * chunks:
            break
        chunks *= 2
    return chunks


def _loss_chunks(plans: Sequence[Plan], space: Space, foresight: Tracing) -> list[dict[str, Chosen]]:
    """For each plan its choice, or nothing. What they are predicted from is traced in one go."""
    if "loss_chunks" in space.fixed:
        return [{} for _ in plans]
    profile = foresight.trace()
    chosen = [_chunks(plan, space, profile) for plan in plans]
    chunked = [
        plan.model_copy(update={"loss_chunks": chunks})
        for plan, (chunks, _) in zip(plans, chosen, strict=True)
        if chunks > 1
    ]
    try:
        foresight.prepare(chunked)
    except InputError as problem:
        # What a model of somebody else's does to its logits is not known before it is looked at.
        if problem.details.get("field") != "plan.loss_chunks":
            raise
        said = problem.message.partition("plan.loss_chunks: ")[2] or problem.message  # without the recipe's name
        why = f"{said}; else they would be computed in parts"
        return [{"loss_chunks": (1, why)} if chunks > 1 else {} for chunks, _ in chosen]
    return [
        {"loss_chunks": _if_it_saves(plan, choice, foresight)} if choice[1] else {}
        for plan, choice in zip(plans, chosen, strict=True)
    ]


def _if_it_saves(plan: Plan, choice: Chosen, foresight: Foresight) -> Chosen:
    """Parts keep the gradient of the output layer from forward on: of a wide one that is more than they save."""
    whole, parts = (foresight.memory(p).peak for p in (plan, plan.model_copy(update={"loss_chunks": choice[0]})))
    if parts <= whole:
        return choice
    return 1, f"in parts it would take {gib(parts)} in place of {gib(whole)}"


def _chunks(plan: Plan, space: Space, profile: ModelProfile) -> Chosen:
    model, capability = space.case.model, space.case.capability if space.case.on_gpus else None
    rows, columns = profile.last_product(plan.micro_batch) or (0, None)
    if model.kind == "user":  # whether these are logits is seen when their loss is traced in parts
        choice = chosen_chunks(plan, capability, columns, rows)
        return choice if choice[0] > 1 else (1, "")
    tokens = (profile.tokens_per_sample or 0) * plan.micro_batch
    return chosen_chunks(plan, capability, model.vocabulary, tokens or rows)  # no tokens: a dataset of the user's


def chosen_chunks(plan: Plan, capability: tuple[int, int] | None, vocabulary: int | None, tokens: int) -> Chosen:
    """A value, and why; without a reason where nobody would ask.

    `capability`: of the GPU, if there is one. `tokens`: of a micro-batch.
    """
    mesh = plan.mesh
    divided = mesh.tensor * mesh.pipeline * mesh.context > 1
    if vocabulary is None or divided or plan.precision not in NARROW:
        return 1, ""
    if capability is None or capability < LOSS_KERNEL_CAPABILITY:
        return 1, "the kernel that makes it no slower is for GPUs of compute capability 8.0 or newer"
    if vocabulary < LEAST_COLUMNS:
        return 1, f"the kernel that makes it no slower is for {LEAST_COLUMNS:,} classes and more"
    chunks, logits = chunks_of(tokens, vocabulary), tokens * vocabulary * LOGIT_BYTES
    if chunks == 1:
        few = f"in parts of fewer than {LEAST_CHUNK_TOKENS:,} tokens matrices would be small"
        return 1, f"all logits at once take no more than {gib(CHUNK_BYTES)}" if logits <= CHUNK_BYTES else few
    return chunks, f"all logits at once would take {gib(logits)}, and go through memory four times"


def more_parts_than_tokens(plan: Plan, tokens: int | None) -> str | None:
    """What to say where the recipe wants the loss of a micro-batch of so many tokens in more parts than that."""
    if not tokens or plan.loss_chunks <= tokens:
        return None
    few = count_text(tokens, "token")
    return f"plan.loss_chunks is {plan.loss_chunks:,}, and a micro-batch has {few}: each is a part of its own"


# --- recompute_blocks


def with_fewer_blocks(plan: Plan, space: Space, foresight: Tracing) -> Settled:
    """As few recomputed blocks as fit, where the planner decided to recompute: who says so means all of them.

    None at all, if a loss in parts has made room enough.
    """
    blocks = foresight.trace().block_count
    if plan.recompute == "none" or {"recompute", "recompute_blocks"} & space.fixed.keys() or blocks < 2:
        return plan, {}
    if refusal(space, _recomputing(plan, 1)) is not None or foresight.verdict(plan) != "fits":
        return plan, {}
    fewest = bisect_left(range(blocks), True, key=lambda first: foresight.verdict(_recomputing(plan, first)) == "fits")
    if fewest == blocks:
        return plan, {}
    chosen, reasons = _recomputing(plan, fewest), dict[str, str]()
    if fewest and foresight.limit_bytes is not None:
        less, peak = (gib(foresight.memory(_recomputing(plan, first)).peak) for first in (fewest - 1, fewest))
        limit = f"of {in_gib(foresight.limit_bytes)}"
        reasons["recompute_blocks"] = f"the first of {blocks}: {peak} {limit}; with one less {less}"
    return chosen, reasons


def _recomputing(plan: Plan, first: int) -> Plan:
    return plan.model_copy(update={"recompute_blocks": first} if first else {"recompute": "none"})


# --- micro_batch


def with_larger_micro_batch(smaller: Settled, space: Space, foresight: Tracing) -> Settled:
    """On one GPU, a larger micro-batch for which a loss in parts or recomputing makes room, if that is faster.

    There accumulating costs more than small matrices do: sums of gradients are wide, and not updated from in one pass.
    """
    plan, seconds = smaller[0], foresight.seconds(smaller[0])
    if plan.mesh.world_size > 1 or plan.accumulate == 1 or seconds is None or foresight.verdict(plan) != "fits":
        return smaller
    best, fastest = smaller, seconds - gain_worth_it(seconds)
    sizes = sorted(size for size in micro_batches(space, plan) if size > plan.micro_batch)
    for size in [size for size in sizes if _at_best(with_micro_batch(space, plan, size), space, foresight) < fastest]:
        larger = _made_to_fit(with_micro_batch(space, plan, size), space, foresight)
        if larger is None:
            break
        taken = foresight.seconds(larger[0])
        if taken is not None and taken < fastest:
            in_pieces = f"in micro-batches of {plan.micro_batch} a step would take {seconds:.3g} s, so {taken:.3g}"
            best, fastest = (larger[0], larger[1] | {"micro_batch": in_pieces}), taken
    return best


def _at_best(plan: Plan, space: Space, foresight: Tracing) -> float:
    """Seconds of a step, if there were room: what gains nothing then is not traced in other parts of the loss."""
    roomy = plan.model_copy(update={"recompute": "none", "recompute_blocks": None} | space.fixed)
    seconds = foresight.seconds(roomy)
    return seconds if seconds is not None else math.inf


def _made_to_fit(plan: Plan, space: Space, foresight: Tracing) -> Settled | None:
    """With the loss in parts, if need be, and with as little recomputing as will do."""
    limit = foresight.limit_bytes
    plain = {"recompute_blocks": None, "loss_chunks": 1}
    for policy in (plan.recompute,) if {"recompute", "recompute_blocks"} & space.fixed.keys() else RECOMPUTE:
        tried = plan.model_copy(update={"recompute": policy, **plain} | space.fixed)
        if refusal(space, tried) is not None:
            continue
        whole = foresight.memory(tried)
        if limit is not None and whole.peak - whole.logits > limit:  # then parts need not be traced
            continue
        (chunked,) = _with_loss_chunks([tried], space, foresight)
        if foresight.verdict(chunked[0]) == "fits":
            return _and(chunked, with_fewer_blocks(chunked[0], space, foresight))
    return None


# --- cuda_graph


def with_cuda_graph(plan: Plan, space: Space, foresight: Tracing) -> Settled:
    if "cuda_graph" in space.fixed:
        return plan, {}
    graphed = plan.model_copy(update={"cuda_graph": True})
    refused = RULES["cuda_graph"](replace(space.case, plan=graphed))
    against = reason_of(refused) if refused is not None else _against_graphs(plan, space, foresight)
    if against:
        return plan, {"cuda_graph": against}
    before, after, lacking = foresight.seconds(plan), foresight.seconds(graphed), foresight.launching_seconds(plan)
    if before is None or after is None:
        return plan, {"cuda_graph": "how fast the GPU is, is not known, nor whether it waits for the host"}
    if lacking <= NOTICED * before:  # GPT-2 gained 0 to 1 % on an H200, a model of 1.3B nothing
        return plan, {"cuda_graph": "the device hardly waits for the host, and a recorded step keeps its memory"}
    why = (
        f"three launches for a step: else {lacking * 1000:.3g} of {before * 1000:.3g} ms the device waits for the"
        f" host, and {after * 1000:.3g} are left"
    )
    return graphed, {"cuda_graph": why}


def _against_graphs(plan: Plan, space: Space, foresight: Foresight) -> str:
    """Why a step that could be recorded is not, unless the recipe says so."""
    recipe = space.recipe
    if space.case.model.kind != "reference":
        return f"what {space.case.model.name} does on the host would be frozen; the recipe can say true"
    if recipe.loss is not None and not recipe.loss.built_in:
        return f"what {recipe.loss.use} does on the host would be frozen; the recipe can say true"
    if recipe.data.packs:
        return "packed documents have other lengths in each step"
    if recipe.data.group_by_length is not None:
        return "batches grouped by length have other shapes"
    if recipe.hooks:
        return "what hooks do to the model is not recorded; the recipe can say true"
    if plan.recompute != "none" and not plan.compile:
        return "recomputing without compile sets random numbers back on the host"
    peak, limit = foresight.memory(plan).peak, foresight.limit_bytes
    if limit is None:
        return "how much memory there is is not known, and a recorded step keeps what it needs"
    if peak > MOST_RECORDED * limit:
        return f"{gib(peak)} of {in_gib(limit)}: a recorded step keeps them, and an evaluation needs some besides"
    return ""
