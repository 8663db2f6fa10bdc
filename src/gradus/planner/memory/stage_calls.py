"""Stage calls: the parts that a stage of a plan calls, with what each needs of a rank's memory. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradus.planner.memory.framework import Framework
from gradus.planner.memory.moments import Call, elements
from gradus.planner.memory.timeline import NOTHING_LIVE, Division, Live, PartMemory, part_memory
from gradus.planner.profile.program import ModelProfile, Part
from gradus.planner.rewritten.as_planned import as_planned
from gradus.schema.plan import Plan


def calls_of_stage(
    profile: ModelProfile,
    plan: Plan,
    framework: Framework,
    division: Division,
    staged: Sequence[Sequence[int]],
    stage: int,
) -> tuple[Call, ...]:
    """The parts of a stage, with what they need of memory under this plan."""
    block = sum(profile.parts[number].block for calls in staged[:stage] for number in calls)
    blocks = block + sum(profile.parts[number].block for calls in staged[stage:] for number in calls)
    made: dict[int, Call] = {}
    found: list[Call] = []
    for number in staged[stage]:
        if number not in made:
            made[number] = _call(profile, number, plan, framework, division, blocks > 0)
        call = replace(made[number], name=_name(profile.parts[number], block, blocks))
        if call.part.block:
            block += 1
        found.append(call)
    if stage > 0 and not framework.torch_pipelines:  # a micro-batch brings its input along; otherwise see `passed_on`
        first = found[0]
        received = Live(activations=first.memory.received)
        memory = replace(
            first.memory,
            kept=first.memory.kept.plus(received),
            forward=first.memory.forward.plus(received),
            backward=first.memory.backward.plus(received),
            backward_adding=first.memory.backward_adding.plus(received),
        )
        found[0] = replace(first, memory=memory)
    return tuple(found)


@dataclass(frozen=True)
class PassedOn:
    """Bytes that a micro-batch brings to a stage and takes away from it; nothing at the ends of the pipeline."""

    received: int
    sent: int

    @property
    def total(self) -> int:
        """Of activations. Gradients go the other way, with as many."""
        return self.received + self.sent


def passed_on(profile: ModelProfile, division: Division, staged: Sequence[Sequence[int]], stage: int) -> PassedOn:
    def output(calls: Sequence[int]) -> int:
        return division.size(profile.parts[calls[-1]].output, "sequence")

    return PassedOn(
        received=output(staged[stage - 1]) if stage > 0 else 0,
        sent=output(staged[stage]) if stage < len(staged) - 1 else 0,
    )


def _name(part: Part, block: int, blocks: int) -> str:
    """As people say it: `block` blocks of all `blocks` come before the part."""
    if part.block:
        return f"block {block}"
    return f"what comes {'after' if block else 'before'} the blocks" if blocks else "the model"


def _call(
    profile: ModelProfile, number: int, plan: Plan, framework: Framework, division: Division, has_blocks: bool
) -> Call:
    part = profile.parts[number]
    offloaded = plan.activation_offload and (part.block or not has_blocks)
    memory = part_memory(as_planned(profile, number, plan), division, offloaded)
    on_host = memory.kept.total if offloaded else 0
    if offloaded:
        memory = replace(memory, kept=NOTHING_LIVE)
    memory = _with_gathered_sequence(memory, part, plan, framework, division)
    memory = _with_divided_loss(memory, part, division)
    shared = replace(division, expert=1) if plan.sharded else division
    copies_made = not plan.sharded and not plan.narrow_weights and not framework.narrow_parameters
    if not copies_made:
        memory = _without_copies(memory)
    return Call(
        part,
        part.name,
        memory,
        elements(part, division),
        elements(part, division, trained_only=True),
        elements(part, shared),
        elements(part, shared, trained_only=True),
        _exchanged(part, plan, division),
        on_host,
    )


def _without_copies(memory: PartMemory) -> PartMemory:
    """Of parameters that are in the narrow format, autocast makes no copies."""

    def without(live: Live) -> Live:
        return live._replace(copies=0)

    return replace(
        memory,
        forward=without(memory.forward),
        kept=without(memory.kept),
        backward=without(memory.backward),
        backward_adding=without(memory.backward_adding),
        cached=0,
    )


def _with_gathered_sequence(
    memory: PartMemory, part: Part, plan: Plan, framework: Framework, division: Division
) -> PartMemory:
    """With the sequence in slices between divided layers: the whole of it, which these layers work on."""
    if not division.sequence or not part.gathered:
        return memory
    whole = replace(division, tensor=1, sequence=False)
    rest = [round(whole.size(amount) * (1 - 1 / division.tensor)) for amount in part.gathered]
    keeps = framework.keeps_gathered and (plan.recompute == "none" or part.spared)
    there = Live(activations=sum(rest) if framework.keeps_gathered else max(rest))
    return replace(
        memory,
        forward=memory.forward.plus(there),
        kept=memory.kept.plus(there) if keeps else memory.kept,
        backward=memory.backward.plus(there),
        backward_adding=memory.backward_adding.plus(there),
    )


def _with_divided_loss(memory: PartMemory, part: Part, division: Division) -> PartMemory:
    """Over a divided vocabulary the loss is one function: probabilities and their gradient are all that backward has
    of the size of logits (parallel/vocabulary.py), where torch's cross-entropy has a third."""
    sizes = [division.size(s.bytes, s.divides) for s in part.storages if s.role == "logits" and s.divides == "tensor"]
    if division.tensor == 1 or not sizes:
        return memory

    def at_most_two(live: Live) -> Live:
        return live._replace(logits=min(live.logits, 2 * max(sizes)))

    return replace(memory, backward=at_most_two(memory.backward), backward_adding=at_most_two(memory.backward_adding))


def _exchanged(part: Part, plan: Plan, division: Division) -> int:
    total = 0
    if division.context > 1:
        piece = division.size(part.keys_and_values, "tensor")
        gathers = plan.context_attention == "gather"
        total += piece * division.context if gathers else 2 * piece  # those at hand, and those that arrive
    if division.expert > 1:
        total += 2 * division.size(part.sent_to_experts)  # what is sent, and what arrives
    return total
