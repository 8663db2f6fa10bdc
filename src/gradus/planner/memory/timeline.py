"""Timeline: the memory of a part of a model, operator by operator, on one rank. No torch.

A part's storages come and go while its operators run. What is there at the worst moment of forward and of backward,
and what stays in between, is all that the rest of a step has to know of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from gradus.planner.profile.program import Amount, Divides, Part, Role, Storage

ROUNDING = 512  # torch's allocator hands out multiples of it (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)
MOST_REMEMBERED = 20_000  # parts under some division; a search asks for the same ones again and again


@dataclass(frozen=True)
class Division:
    """How much of a part one rank sees: samples of a micro-batch, and ways that layers and sequences are divided."""

    micro_batch: float
    tensor: int = 1
    sequence: bool = False  # divided between the layers of a tensor group as well
    context: int = 1
    expert: int = 1

    def ways(self, divides: Divides) -> int:
        """Over how many ranks of a tensor group a thing is divided."""
        return self.tensor if divides == "tensor" or (divides == "sequence" and self.sequence) else 1

    def size(self, amount: Amount, divides: Divides = "whole", expert: bool = False, role: Role = "activation") -> int:
        """Bytes on one rank.

        Tokens are taken to be spread evenly over experts: a rank then computes as many as it sends away. What belongs
        to the weights of experts is on the ranks that hold them.
        """
        held = self.expert if expert and role in ("copy", "gradient") else 1
        size = (amount.fixed + amount.per_sample * self.micro_batch / self.context) / (self.ways(divides) * held)
        return -int(-size // ROUNDING) * ROUNDING


class Live(NamedTuple):
    """Bytes that are there at one moment, by what they are for."""

    activations: int = 0
    logits: int = 0
    copies: int = 0  # of parameters, in a narrower format
    gradients: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def plus(self, other: Live, times: int = 1) -> Live:
        return Live(
            self.activations + times * other.activations,
            self.logits + times * other.logits,
            self.copies + times * other.copies,
            self.gradients + times * other.gradients,
            self.workspace + times * other.workspace,
        )


NOTHING_LIVE = Live()
_FIELDS: dict[Role, str] = {
    "activation": "activations",
    "logits": "logits",
    "copy": "copies",
    "gradient": "gradients",
    "workspace": "workspace",
}


@dataclass(frozen=True)
class PartMemory:
    """A part of a model in one rank's memory."""

    forward: Live  # at the worst moment of forward; without what other parts left
    kept: Live  # after it, for backward
    cached: int  # copies of parameters that nobody needs, and that stay until forward of the model ends
    backward: Live  # at the worst moment of backward, with what was kept, and gradients that pile up
    backward_adding: Live  # the same where each gradient is added to one that is there already, and goes
    gradients: int  # bytes of all of them, when backward is done
    left: int  # what else is there when backward is done, and stays
    received: int  # what this part keeps of its input, which the part before has made


def part_memory(part: Part, division: Division, waiting_on_host: bool = False) -> PartMemory:
    """What a rank holds of a part. With `waiting_on_host`, what is kept is there only while somebody reads it."""
    key = (id(part), division, waiting_on_host)
    found = _remembered.get(key)
    if found is None or found[0] is not part:
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.clear()
        found = _remembered[key] = (part, _part_memory(part, division, waiting_on_host))
    return found[1]


# By identity: to compare parts, or to hash one, would look at all of its operators. The part is kept, so that its
# number is nobody else's.
_remembered: dict[tuple[int, Division, bool], tuple[Part, PartMemory]] = {}


def _part_memory(part: Part, division: Division, waiting_on_host: bool) -> PartMemory:
    ends, count = len(part.forward), len(part.operators)
    read_later = {storage for operator in part.operators[ends:] for storage in operator.reads}
    piling, adding = _Tally(count), _Tally(count)
    reads = _readers(part) if waiting_on_host else {}
    kept: dict[str, int] = {}
    gradients = left = received = cached = 0
    for number, storage in enumerate(part.storages):
        if storage.from_samples > division.micro_batch / division.context:
            continue
        size = division.size(storage.bytes, storage.divides, storage.expert, storage.role)
        name = _FIELDS[storage.role]
        if storage.made < 0:
            received += size if storage.last >= ends and storage.role == "activation" else 0
            continue
        if storage.role == "gradient":
            gradients += size
            piling.add(name, size, storage.made, count - 1)
            adding.add(name, size, storage.made, storage.made)
            continue
        is_kept = storage.made < ends <= storage.last
        if is_kept and storage.role == "copy" and storage.last == ends and number not in read_later:
            cached += size
            is_kept = False
        elif is_kept:
            kept[name] = kept.get(name, 0) + size
        elif storage.last >= count:
            left += size
        spans = _spans_while_read(storage, ends, reads.get(number, [])) if is_kept and waiting_on_host else None
        for first, last in spans or [(storage.made, storage.last)]:
            for tally in (piling, adding):
                tally.add(name, size, first, min(last, count - 1 if is_kept or first >= ends else ends - 1))
    return PartMemory(
        forward=piling.worst(range(ends)),
        kept=Live(**kept),
        cached=cached,
        backward=piling.worst(range(ends, count)),
        backward_adding=adding.worst(range(ends, count)),
        gradients=gradients,
        left=left,
        received=received,
    )


class _Tally:
    """Bytes by purpose at each operator, from what begins and ends there."""

    def __init__(self, operators: int) -> None:
        self._changes = {name: [0] * (operators + 1) for name in _FIELDS.values()}

    def add(self, name: str, size: int, first: int, last: int) -> None:
        changes = self._changes[name]
        if first <= last:
            changes[first] += size
            changes[last + 1] -= size

    def worst(self, operators: range) -> Live:
        """At that of these operators at which most is there."""
        if not operators:
            return NOTHING_LIVE
        sums = {name: list(accumulate(changes)) for name, changes in self._changes.items()}
        totals = [sum(at) for at in zip(*sums.values(), strict=True)]
        at = max(operators, key=totals.__getitem__)
        return Live(**{name: values[at] for name, values in sums.items()})


def _readers(part: Part) -> dict[int, list[int]]:
    """The operators that read or write each storage, in order."""
    found: dict[int, list[int]] = {}
    for number, operator in enumerate(part.operators):
        for storage in {*operator.reads, *operator.writes}:
            found.setdefault(storage, []).append(number)
    return found


def _spans_while_read(storage: Storage, ends: int, readers: Sequence[int]) -> list[tuple[int, int]]:
    """When a kept storage is on the device: until forward is done with it, and from backward's first use of it on."""
    before = max((n for n in readers if n < ends), default=storage.made)
    after = min((n for n in readers if n >= ends), default=storage.last)
    return [(storage.made, before), (min(after, storage.last), storage.last)]
