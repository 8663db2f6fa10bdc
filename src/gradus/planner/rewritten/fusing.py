"""Fusing: the kernels that inductor makes of a sequence of nodes.

- What is done element by element is written to memory only where something has to read it there: a library's kernel,
  backward, another part. Everything else computes it where it needs it, from what is in memory (unless several need it
  and it takes more than four reads).
- Steps that are equally many unfusible kernels away from the beginning, and of which one reads what another writes or
  both read the same, are one kernel: it reads each value once and writes those that others need.
- A reduction over the samples is a kernel of its own, in two passes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gradus.planner.profile.program import NOTHING, Amount, Kind, Operator
from gradus.planner.rewritten.dataflow import NOMINAL_SAMPLES, Flow, Node

_MOST_READS_TO_REPEAT = 4  # torch/_inductor/config.py of 2.13: realize_reads_threshold
_NAMES_SHOWN = 4


@dataclass(frozen=True)
class Kernel:
    """Something that is launched; `operator` has its reads and writes still as values."""

    operator: Operator
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    numbers: tuple[int, ...]  # of the part's operators that it does the work of
    in_place: bool  # a result may be written where an input was that nothing reads any more


@dataclass
class _Step:
    """A node that writes to memory, with all that it computes on the way."""

    node: Node
    position: int
    writes: list[int]
    shares: dict[int, float]  # values in memory that it reads, and how much of each
    beside: Amount
    inside: list[Node]
    level: int = 0


def fused(flow: Flow, nodes: Sequence[Node], wanted: set[int]) -> list[Kernel]:
    """The kernels of these nodes, in an order in which they can run. Wanted values are in memory afterwards."""
    steps = _steps(flow, nodes, wanted)
    groups = _groups(flow, steps)
    group_of = {value: number for number, group in enumerate(groups) for step in group for value in step.writes}
    readers: dict[int, set[int]] = defaultdict(set)
    for number, group in enumerate(groups):
        for step in group:
            for value in step.shares:
                readers[value].add(number)
    kernels = []
    for number in _ordered(groups, group_of):
        group = groups[number]
        written = [v for step in group for v in step.writes if v in wanted or readers[v] - {number}]
        kernels.append(_kernel(flow, group, written, {v for step in group for v in step.writes}))
    return kernels


@dataclass
class _Inline:
    """How a value that is not in memory is computed."""

    shares: dict[int, float]
    beside: Amount
    inside: list[Node] = field(default_factory=list)


def _steps(flow: Flow, nodes: Sequence[Node], wanted: set[int]) -> list[_Step]:
    users: dict[int, int] = defaultdict(int)
    for node in nodes:
        for value in node.reads:
            users[value] += 1
    in_memory = wanted | {value for node in nodes if not node.fuses for value in node.reads}
    inline: dict[int, _Inline] = {}
    steps = []
    for position, node in enumerate(nodes):
        found = _gathered(node, inline)
        several = any(users[value] > 1 for value in node.writes) and len(found.shares) > _MOST_READS_TO_REPEAT
        if node.work == "map" and node.fuses_on and not several:
            writes = [value for value in node.writes if value in in_memory]
            inline |= {value: found for value in node.writes if value not in in_memory}
        else:
            writes = list(node.writes)
        if writes or not node.writes:
            steps.append(_Step(node, position, writes, found.shares, found.beside, found.inside))
    return steps


def _gathered(node: Node, inline: dict[int, _Inline]) -> _Inline:
    """What a node reads from memory, itself and through what it computes on the way."""
    shares: dict[int, float] = {}
    beside = node.beside
    inside = {id(node): node}
    for value, share in zip(node.reads, node.shares, strict=True):
        through = inline.get(value)
        if through is None:
            shares[value] = min(1.0, shares.get(value, 0.0) + share)
            continue
        for leaf, part in through.shares.items():
            shares[leaf] = max(shares.get(leaf, 0.0), part * share)
        new = [other for other in through.inside if id(other) not in inside]
        inside |= {id(other): other for other in new}
        for other in new:
            beside = beside.plus(other.beside)
    return _Inline(shares, beside, list(inside.values()))


def _groups(flow: Flow, steps: list[_Step]) -> list[list[_Step]]:
    """Which steps are one kernel."""
    maker = {value: number for number, step in enumerate(steps) for value in step.writes}
    available: dict[int, int] = {}
    leader = list(range(len(steps)))

    def led_by(number: int) -> int:
        while leader[number] != number:
            leader[number] = number = leader[leader[number]]
        return number

    sharing: dict[tuple[int, int], int] = {}
    for number, step in enumerate(steps):
        step.level = max((available.get(value, 0) for value in step.shares), default=0)
        goes_on = step.node.work in ("map", "rows")
        for value in step.writes:
            available[value] = step.level + (0 if goes_on else 1)
        if not goes_on:
            continue
        for value in step.shares:
            other = maker.get(value)
            if other is not None and available[value] == step.level and steps[other].node.work in ("map", "rows"):
                leader[led_by(number)] = led_by(other)
        if step.shares:
            largest = max(step.shares, key=flow.size)
            other = sharing.setdefault((step.level, largest), number)
            leader[led_by(number)] = led_by(other)
    groups: dict[int, list[_Step]] = defaultdict(list)
    for number, step in enumerate(steps):
        groups[led_by(number)].append(step)
    return list(groups.values())


def _ordered(groups: list[list[_Step]], group_of: dict[int, int]) -> list[int]:
    """So that everything is written before it is read, and otherwise as it was."""
    waits: list[set[int]] = []
    for number, group in enumerate(groups):
        makers = {group_of[value] for step in group for value in step.shares if value in group_of}
        waits.append(makers - {number})
    after: dict[int, list[int]] = defaultdict(list)
    for number, makers in enumerate(waits):
        for maker in makers:
            after[maker].append(number)
    left = [len(makers) for makers in waits]
    ready = [(max(step.position for step in groups[n]), n) for n, count in enumerate(left) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for other in after[number]:
            left[other] -= 1
            if left[other] == 0:
                heapq.heappush(ready, (max(step.position for step in groups[other]), other))
    assert len(order) == len(groups), "kernels that wait for each other"
    return order


def _kernel(flow: Flow, group: list[_Step], written: list[int], made: set[int]) -> Kernel:
    shares: dict[int, float] = {}
    for step in group:
        for value, share in step.shares.items():
            if value not in made:
                shares[value] = min(1.0, shares.get(value, 0.0) + share)
    inside = list({id(node): node for step in group for node in step.inside}.values())
    numbers = tuple(sorted({node.number for node in inside}))
    first = group[0].node
    if not first.fuses:
        return Kernel(first.operator, tuple(shares), tuple(group[0].writes), numbers, in_place=False)
    read = _added(flow.values[value].bytes.times(share) for value, share in shares.items())
    beside = _added(node.beside for node in {node.number: node for node in inside}.values())
    main = max((node.operator for node in inside), key=lambda operator: operator.written.at(NOMINAL_SAMPLES))
    over_samples = any(step.node.work == "columns" for step in group)
    operator = Operator(
        name=_name(node.operator.name for node in inside),
        kind=_kind(group, inside),
        flops=_added({node.number: node.operator.flops for node in inside}.values()),
        read=read.plus(beside),
        written=_added(flow.values[value].bytes for value in written),
        dtype=main.dtype,
        kernels=2 if over_samples else 1,
        divides=main.divides,
        expert=main.expert,
    )
    return Kernel(operator, tuple(shares), tuple(written), numbers, in_place=True)


def _kind(group: list[_Step], inside: list[Node]) -> Kind:
    if any(step.node.work in ("rows", "columns") for step in group):
        return "reduction"
    kinds = {node.operator.kind for node in inside}
    if kinds == {"copy"}:
        return "copy"
    return "lookup" if "lookup" in kinds else "pointwise"


def _name(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(name.strip("_") for name in names))
    if len(distinct) == 1:
        return distinct[0]
    more = [] if len(distinct) <= _NAMES_SHOWN else [f"{len(distinct) - _NAMES_SHOWN}_more"]
    return "_".join(["fused", *distinct[:_NAMES_SHOWN], *more])


def _added(amounts: Iterable[Amount]) -> Amount:
    total = NOTHING
    for amount in amounts:
        total = total.plus(amount)
    return total
