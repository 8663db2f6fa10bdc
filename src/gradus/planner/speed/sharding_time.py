"""Sharding time: what ranks with other samples exchange in a step, parameters and gradients, and how much of it hides
behind what is computed. No torch.

- Replicas (DDP) add up gradients in buckets while the backward of the last micro-batch goes on: all but what does not
  fit behind it, and the last bucket, is hidden.
- Shards (FSDP2) gather the parameters of the next block while this one is computed, and scatter the gradients of the
  last one; of each block, what takes longer than computing it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradus.planner.profile.program import Part
from gradus.planner.speed.device import Device
from gradus.planner.speed.network import Fabric, Group, all_gather, all_reduce, group_of, reduce_scatter
from gradus.planner.speed.part_time import Exchange
from gradus.planner.zero import number_bytes
from gradus.schema.plan import Plan

MIB = 2**20


@dataclass(frozen=True)
class Elements:
    """Parameters of a part on a rank of a tensor group, before sharding: those of experts apart."""

    shared: float = 0.0
    shared_trained: float = 0.0
    expert: float = 0.0
    expert_trained: float = 0.0
    tensors: float = 0.0  # trained ones

    @property
    def trained(self) -> float:
        return self.shared_trained + self.expert_trained


def elements_of(part: Part, plan: Plan) -> Elements:
    shared = shared_trained = expert = expert_trained = tensors = 0.0
    for weights in part.weights:
        count = weights.elements / (plan.mesh.tensor if weights.divides == "tensor" else 1)
        if weights.expert:
            count /= plan.mesh.expert
            expert += count
            expert_trained += count if weights.trained else 0
        else:
            shared += count
            shared_trained += count if weights.trained else 0
        tensors += weights.tensors if weights.trained else 0
    return Elements(shared, shared_trained, expert, expert_trained, tensors)


@dataclass(frozen=True)
class Stretch:
    """A part as it is called in a stage: what of it is to be gathered and scattered, and how long it computes."""

    elements: Elements
    block: bool
    forward: float
    backward: float  # with what is recomputed


@dataclass(frozen=True)
class Sharding:
    """The groups that parameters and gradients are exchanged in."""

    plan: Plan
    fabric: Fabric
    shards: Group
    expert_shards: Group
    replicas: Group
    all: Group  # of DDP
    gathered_bytes: int  # of an element
    reduced_bytes: int

    @classmethod
    def of(cls, plan: Plan, fabric: Fabric) -> Sharding:
        mesh, per_node = plan.mesh, fabric.ranks_per_node
        narrow, wide = number_bytes(plan.precision)
        if plan.zero:
            shards = group_of(mesh, ("shard", "context"), per_node)
            replicas = group_of(mesh, ("replicate",), per_node)
        else:
            shards, replicas = Group(1), group_of(mesh, ("replicate", "context"), per_node)
        # Ranks with the same experts are as far apart as there are ranks with others in between.
        size = max(1, shards.size // mesh.expert)
        experts = Group(size, min(size, shards.nodes))
        return cls(
            plan=plan,
            fabric=fabric,
            shards=shards,
            expert_shards=experts,
            replicas=replicas,
            all=group_of(mesh, ("replicate", "shard", "context"), per_node),
            gathered_bytes=narrow,
            reduced_bytes=2 if plan.compression == "bf16" else wide,
        )

    def gathering(self, elements: Elements) -> float:
        size = self.gathered_bytes
        return all_gather(elements.shared * size, self.shards, self.fabric) + all_gather(
            elements.expert * size, self.expert_shards, self.fabric
        )

    def scattering(self, elements: Elements) -> float:
        size = self.reduced_bytes
        return reduce_scatter(elements.shared_trained * size, self.shards, self.fabric) + reduce_scatter(
            elements.expert_trained * size, self.expert_shards, self.fabric
        )

    def averaging(self, elements: Elements) -> float:
        """Over replicas, of what a shard is left with."""
        size = self.reduced_bytes * (
            elements.shared_trained / self.shards.size + elements.expert_trained / self.expert_shards.size
        )
        return all_reduce(size, self.replicas, self.fabric)


def replicas_exchange(stretches: Sequence[Stretch], sharding: Sharding, *, hidden: bool) -> Exchange:
    """Gradients of a step added up over replicas, behind the backward of the last micro-batch where it is `hidden`."""
    group = sharding.all
    size = sharding.reduced_bytes * sum(stretch.elements.trained for stretch in stretches)
    if group.size == 1 or size <= 0:
        return Exchange()
    bucket = min(size, sharding.plan.bucket_mib * MIB)
    total = all_reduce(bucket, group, sharding.fabric) * size / bucket
    if not hidden:
        return Exchange(exposed=all_reduce(size, group, sharding.fabric))
    every = max(1, sharding.plan.synchronise_every)
    if every > 1:  # local SGD: parameters, once in so many steps, with nothing to hide behind
        return Exchange(exposed=all_reduce(size, group, sharding.fabric) / every)
    backward = sum(stretch.backward for stretch in stretches)
    last = total * bucket / size
    exposed = min(total, max(last, total - backward + last))
    return Exchange(exposed, total - exposed)


def shards_exchange(stretches: Sequence[Stretch], sharding: Sharding, *, hidden: bool) -> tuple[Exchange, Exchange]:
    """Of a micro-batch in the middle of a step, and what the step's first and last add to it."""
    plan = sharding.plan
    pipelined = plan.mesh.pipeline > 1
    kinds = {id(stretch): stretch.elements for stretch in stretches}  # blocks that are alike are one object
    gathering = {kind: sharding.gathering(elements) for kind, elements in kinds.items()}
    scattering = {kind: sharding.scattering(elements) for kind, elements in kinds.items()}
    averaging = {kind: sharding.averaging(elements) for kind, elements in kinds.items()}
    gathers, scatters, averages = (
        [seconds[id(stretch)] for stretch in stretches] for seconds in (gathering, scattering, averaging)
    )
    each_time = plan.zero == 3 and not pipelined
    # Parts around the blocks stay gathered from forward to backward.
    again = [gather if each_time and stretch.block else 0.0 for gather, stretch in zip(gathers, stretches, strict=True)]
    ahead = [stretch.forward for stretch in stretches]
    behind = [stretch.backward for stretch in stretches]
    scatter_each = plan.zero >= 2 and not pipelined
    middle = Exchange()
    if each_time:
        middle = middle.plus(_hidden_ahead(gathers, ahead, hidden))
    middle = middle.plus(_hidden_behind(again, scatters if scatter_each else [0.0] * len(scatters), behind, hidden))
    once = Exchange()
    if not each_time:
        once = once.plus(_hidden_ahead(gathers, ahead, hidden))
    if not scatter_each:
        # A pipeline reduces when its schedule is over; else the last backward hides it.
        once = once.plus(_hidden_behind([0.0] * len(scatters), scatters, behind, hidden and not pipelined))
    once = once.plus(_hidden_behind([0.0] * len(averages), averages, behind, hidden and not pipelined))
    return middle, once


def _hidden_ahead(gathers: Sequence[float], computing: Sequence[float], hidden: bool) -> Exchange:
    """The first is waited for; each of the others comes while the part before it is computed."""
    total = sum(gathers)
    if not hidden or not gathers:
        return Exchange(exposed=total)
    exposed = gathers[0] + sum(
        max(0.0, gather - before) for gather, before in zip(gathers[1:], computing, strict=False)
    )
    return Exchange(exposed, total - exposed)


def _hidden_behind(
    gathers: Sequence[float], scatters: Sequence[float], computing: Sequence[float], hidden: bool
) -> Exchange:
    """In backward: while a part is computed, the one before it is gathered and the one after it scattered."""
    total = sum(gathers) + sum(scatters)
    if not hidden or not computing:
        return Exchange(exposed=total)
    exposed = scatters[0] + gathers[-1]  # the first part's is the last, with nothing left to compute
    for number, busy in enumerate(computing):
        coming = gathers[number - 1] if number else 0.0
        leaving = scatters[number + 1] if number + 1 < len(scatters) else 0.0
        exposed += max(0.0, coming + leaving - busy)
    exposed = min(exposed, total)
    return Exchange(exposed, total - exposed)


def copying_seconds(elements: Elements, sharding: Sharding, device: Device) -> tuple[float, float]:
    """What FSDP2 copies on the device for one gather, and for one scatter: into and out of one long buffer."""
    if sharding.shards.size == 1:
        return 0.0, 0.0
    rate = device.bytes_per_second * device.speeds.bandwidth["copy"]
    gathered = (elements.shared + elements.expert) * sharding.gathered_bytes
    scattered = elements.trained * (sharding.gathered_bytes + sharding.reduced_bytes)
    return 2 * gathered / rate, scattered / rate
