"""Part time: how long one call of a part takes on one rank, forward and backward, with what its group exchanges in
between. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from gradus.planner.profile.program import Amount, Operator, Part
from gradus.planner.speed.compute import Setting, host_seconds, seconds
from gradus.planner.speed.network import Fabric, Group, all_gather, all_reduce, all_to_all, reduce_scatter, send

_MOST_REMEMBERED = 50_000


@dataclass(frozen=True)
class PartTime:
    """Seconds of one micro-batch in one part. The device's, unless it says host."""

    forward: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0
    attention: float = 0.0  # of forward, and contained in it: what a ring of keys and values can hide behind
    host_forward: float = 0.0
    host_recompute: float = 0.0
    host_backward: float = 0.0

    def plus(self, other: PartTime, times: int = 1) -> PartTime:
        return PartTime(*(getattr(self, name) + times * getattr(other, name) for name in _NAMES))

    @property
    def device(self) -> float:
        return self.forward + self.recompute + self.backward

    @property
    def host(self) -> float:
        return self.host_forward + self.host_recompute + self.host_backward


_NAMES = tuple(f.name for f in fields(PartTime))

# By identity of the part, which the value keeps alive: to hash one costs as much as to compute its time.
_remembered: dict[tuple[int, Setting], tuple[Part, PartTime]] = {}


def part_time(part: Part, setting: Setting) -> PartTime:
    key = (id(part), setting)
    known = _remembered.get(key)
    if known is not None and known[0] is part:
        return known[1]
    if len(_remembered) > _MOST_REMEMBERED:
        _remembered.clear()
    found = _part_time(part, setting)
    _remembered[key] = (part, found)
    return found


def _part_time(part: Part, setting: Setting) -> PartTime:
    speeds = setting.device.speeds
    watching = speeds.host_selective_seconds if setting.watched and part.recompute else 0.0

    def device(operators: Iterable[Operator]) -> float:
        return sum(seconds(operator, setting) for operator in operators)

    def host(operators: Iterable[Operator]) -> float:
        return sum(host_seconds(operator, setting) for operator in operators)

    def graph(operators: Iterable[Operator]) -> float:
        return speeds.host_graph_seconds if any(map(setting.compiles, operators)) else 0.0

    return PartTime(
        forward=device(part.forward),
        recompute=device(part.recompute),
        backward=device(part.backward),
        attention=device(operator for operator in part.forward if operator.kind == "attention"),
        host_forward=host(part.forward) + graph(part.forward) + watching * len(part.forward),
        host_recompute=host(part.recompute) + watching * len(part.recompute),
        host_backward=host(part.backward) + graph(part.backward),  # with what it computes again
    )


@dataclass(frozen=True)
class Exchange:
    """Seconds that one micro-batch in one part is on its way between ranks."""

    exposed: float = 0.0
    overlapped: float = 0.0

    def plus(self, other: Exchange, times: int = 1) -> Exchange:
        return Exchange(self.exposed + times * other.exposed, self.overlapped + times * other.overlapped)


@dataclass(frozen=True)
class Groups:
    """Those that exchange something in the middle of a part."""

    tensor: Group
    context: Group
    expert: Group
    ring: bool  # keys and values go round, rather than being gathered


def tensor_exchange(part: Part, setting: Setting, groups: Groups, fabric: Fabric, *, repeats: float) -> Exchange:
    """What a tensor group sends, which layers wait for. `repeats`: how often forward's share of it is done.

    With the sequence divided between layers, a gather at the entry and a scatter at the exit, and backward the other
    way round. Without, a sum at the exit in forward, and at the entry in backward.
    """
    if setting.tensor == 1:
        return Exchange()

    def sizes(amounts: tuple[Amount, ...]) -> list[float]:
        return [setting.size(amount) for amount in amounts]

    entries, exits = sizes(part.gathered), sizes(part.scattered)
    if setting.sequence_parallel:
        forward = sum(all_gather(size, groups.tensor, fabric) for size in entries)
        forward += sum(reduce_scatter(size, groups.tensor, fabric) for size in exits)
        backward = forward
    else:
        forward = sum(all_reduce(size, groups.tensor, fabric) for size in exits)
        backward = sum(all_reduce(size, groups.tensor, fabric) for size in entries)
    return Exchange(exposed=repeats * forward + backward)


def context_exchange(
    part: Part, setting: Setting, groups: Groups, fabric: Fabric, time: PartTime, *, repeats: float
) -> Exchange:
    """Keys and values of all ranks: gathered before attention, or sent round while it goes on.

    Backward sends twice as much: keys and values again, and their gradients.
    """
    ways = setting.context
    whole = setting.size(part.keys_and_values) * ways  # of all ranks together
    if setting.sequence_parallel or setting.tensor > 1:
        whole /= setting.tensor  # each rank has its own heads
    if ways == 1 or whole <= 0:
        return Exchange()
    if not groups.ring:
        gathering = all_gather(whole, groups.context, fabric)
        return Exchange(exposed=repeats * gathering + gathering + reduce_scatter(whole, groups.context, fabric))
    hop = send(whole / ways, fabric, crosses_nodes=groups.context.nodes > 1)
    total = exposed = 0.0
    for times, sent, hidden in ((repeats, hop, time.attention / ways), (1.0, 2 * hop, 2.5 * time.attention / ways)):
        total += times * (ways - 1) * sent
        exposed += times * (ways - 1) * max(0.0, sent - hidden)
    return Exchange(exposed, total - exposed)


def expert_exchange(part: Part, setting: Setting, groups: Groups, fabric: Fabric, *, repeats: float) -> Exchange:
    """Tokens to the ranks of their experts and back."""
    size = setting.size(part.sent_to_experts)
    once = all_to_all(size, groups.expert, fabric)
    return Exchange(exposed=2 * once * repeats + 2 * once)
