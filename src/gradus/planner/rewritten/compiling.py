"""Compiling: what torch.compile (inductor) makes of a part: fewer kernels, and less that waits for backward.

The part's operators become values and nodes (dataflow.py); a minimum cut says what is kept for backward (saving.py);
what is not kept, backward computes where it needs it; nodes become kernels (fusing.py); and from the kernels follows
when each piece of memory comes and goes. Where forward is computed again anyway, what is kept has been decided, and
what backward computes again runs as late as it can.

A kernel writes its result where one of its inputs was, if nothing reads that any more and it has the same size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

from gradus.planner.profile.program import NOTHING, Amount, Operator, Part, Role, Storage
from gradus.planner.rewritten.dataflow import Flow, Node, flow_of
from gradus.planner.rewritten.fusing import Kernel, fused
from gradus.planner.rewritten.saving import saved_values


def compiled(part: Part) -> Part:
    """The part as it runs after torch.compile. Of a recomputed part too, but not of a compiled one."""
    flow = flow_of(part)
    if part.recompute:
        again, backward = _put_off(flow)
    else:
        again, backward = [], _with_repeats(flow, saved_values(flow))
    later = {value for node in (*again, *backward) for value in node.reads}
    forward_kernels = fused(flow, flow.forward, (later | flow.handed_on) & _made_by(flow.forward))
    used_by_backward = {value for node in backward for value in node.reads}
    again_kernels = fused(flow, again, used_by_backward & _made_by(again))
    left = _left_by_backward(part, flow, backward)
    return _Memory(part, flow, left, forward_kernels, again_kernels, fused(flow, backward, left)).part()


def _made_by(nodes: Iterable[Node]) -> set[int]:
    return {value for node in nodes for value in node.writes}


def _left_by_backward(part: Part, flow: Flow, backward: list[Node]) -> set[int]:
    """Gradients of parameters, and of what the part was given."""
    last_read = {value: node.number for node in backward for value in node.reads}
    made = _made_by(flow.backward)
    done = len(part.operators) - 1
    return {
        value
        for storage, value in flow.final.items()
        if value in made and (value not in last_read or last_read[value] < done <= part.storages[storage].last)
    }


# --- what backward computes again


def _with_repeats(flow: Flow, saved: set[int]) -> list[Node]:
    """Backward, with what it needs of forward and does not find computed right before it is first read."""
    maker = {value: node for node in flow.forward for value in node.writes}
    repeated: dict[int, int] = {}  # values of forward, and those that take their place in backward
    nodes: list[Node] = []

    def repeat(value: int, number: int) -> None:
        waiting = [value]
        while waiting:
            node = maker[waiting[-1]]
            missing = [v for v in node.reads if v in maker and v not in saved and v not in repeated]
            if waiting[-1] in repeated:
                waiting.pop()
            elif missing:
                waiting.extend(missing)
            else:
                waiting.pop()
                values = [flow.values[v] for v in node.writes]
                repeated.update(
                    {
                        v: flow.new(old.bytes, old.storage, final=False)
                        for v, old in zip(node.writes, values, strict=True)
                    }
                )
                nodes.append(
                    replace(_renamed(node, repeated), writes=tuple(repeated[v] for v in node.writes), number=number)
                )

    for node in flow.backward:
        for value in node.reads:
            if value in maker and value not in saved and value not in repeated:
                repeat(value, node.number)
        nodes.append(_renamed(node, repeated))
    return nodes


def _renamed(node: Node, names: dict[int, int]) -> Node:
    return replace(node, reads=tuple(names.get(value, value) for value in node.reads))


def _put_off(flow: Flow) -> tuple[list[Node], list[Node]]:
    """What has to run when backward begins, and backward with the rest put right before it is first read."""
    maker = {value: number for number, node in enumerate(flow.recompute) for value in node.writes}
    first = [number for number, node in enumerate(flow.recompute) if not node.fuses]
    at_once: set[int] = set()
    while first:
        number = first.pop()
        if number not in at_once:
            at_once.add(number)
            first.extend(maker[value] for value in flow.recompute[number].reads if value in maker)
    done = set(at_once)
    nodes: list[Node] = []
    for node in flow.backward:
        needed: set[int] = set()
        waiting = [maker[value] for value in node.reads if value in maker]
        while waiting:
            number = waiting.pop()
            if number not in done:
                done.add(number)
                needed.add(number)
                waiting.extend(maker[value] for value in flow.recompute[number].reads if value in maker)
        nodes.extend(replace(flow.recompute[number], number=node.number) for number in sorted(needed))
        nodes.append(node)
    return [flow.recompute[number] for number in sorted(at_once)], nodes


# --- what inductor adds

_ALIGNED = {"bfloat16": (8, 2), "float16": (8, 2), "float32": (4, 4)}  # elements, and bytes of one


def _aligned_copies(operator: Operator) -> Amount:
    """Of a product of matrices whose sizes are no multiples of what tensor cores work on: bytes of operands that are
    copied with zeros around them (torch/_inductor/fx_passes/pad_mm.py). Sizes that grow with the batch are taken to
    be multiples.
    """
    if operator.kind != "matmul" or not operator.shape or operator.dtype not in _ALIGNED or operator.eager:
        return NOTHING
    aligned, size = _ALIGNED[operator.dtype]
    batch, m, n, k = operator.shape
    if batch.per_sample:
        return NOTHING
    odd = [amount.per_sample == 0 and amount.fixed % aligned != 0 for amount in (m, n, k)]
    copied = NOTHING
    for rows, columns, needed in ((m, k, odd[0] or odd[2]), (k, n, odd[1] or odd[2])):
        if needed:
            grows, fixed = (rows, columns) if rows.per_sample else (columns, rows)
            copied = copied.plus(grows.times(fixed.fixed * max(1.0, batch.fixed) * size))
    return copied


# --- when memory comes and goes


class _Memory:
    """The storages of a part that consists of kernels."""

    def __init__(
        self,
        part: Part,
        flow: Flow,
        left: set[int],
        forward: list[Kernel],
        again: list[Kernel],
        backward: list[Kernel],
    ) -> None:
        self.old, self.flow, self.left = part, flow, left
        self.forward, self.again, self.backward = forward, again, backward
        self.kernels = [*forward, *again, *backward]
        self.old_forward_ends, self.old_ends = len(part.forward), len(part.operators)
        self.forward_ends, self.ends = len(forward), len(self.kernels)
        self.made: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.places: dict[int, int] = {}  # of the part's operators: the kernel that completes them
        for place, kernel in enumerate(self.kernels):
            for value in kernel.reads:
                self.last[value] = place
            for value in kernel.writes:
                self.made[value] = self.last[value] = place
            for number in kernel.numbers:
                self.places[number] = place
        self.known_places = sorted(self.places)
        nodes = (*flow.forward, *flow.recompute, *flow.backward)
        self.eager = {value for node in nodes if node.operator.eager for value in node.writes}
        self.read_eagerly = {value for node in flow.forward if node.operator.eager for value in node.reads}

    def part(self) -> Part:
        self._hold()
        place_of = self._reuse()
        storages: list[Storage] = []
        numbers: dict[int, int] = {}
        for value in sorted({*self.made, *self.flow.given.values()}, key=lambda v: (self.made.get(v, -1), v)):
            if value in place_of:
                numbers[value] = numbers[place_of[value]]
            elif (storage := self._storage(value)) is not None:
                numbers[value] = len(storages)
                storages.append(storage)
        storages += self._beside()

        def operators(kernels: list[Kernel]) -> tuple[Operator, ...]:
            return tuple(
                replace(
                    kernel.operator,
                    reads=tuple(numbers[value] for value in kernel.reads if value in numbers),
                    writes=tuple(numbers[value] for value in kernel.writes if value in numbers),
                )
                for kernel in kernels
            )

        return replace(
            self.old,
            forward=operators(self.forward),
            recompute=operators(self.again),
            backward=operators(self.backward),
            storages=tuple(storages),
        )

    def _reuse(self) -> dict[int, int]:
        """Results that take the place of an input that goes, and that input. It then lives as long as both."""
        values = self.flow.values
        place_of: dict[int, int] = {}
        first = {value: value for value in self.made}  # whose place a value has, in the end
        for place, kernel in enumerate(self.kernels):
            going = [v for v in kernel.reads if self.last[v] == place and self.made.get(v, place) < place]
            for value in kernel.writes:
                same = [v for v in going if values[v].bytes == values[value].bytes]
                if not kernel.in_place:  # unless it changes what it was given
                    same = [v for v in same if values[v].storage == values[value].storage]
                if same and self._role(value) != "gradient":
                    going.remove(same[0])
                    place_of[value] = first[value] = first[same[0]]
        for value, origin in place_of.items():
            self.last[origin] = max(self.last[origin], self.last[value])
        return place_of

    def _role(self, value: int) -> Role:
        role = self.old.storages[self.flow.values[value].storage].role
        return role if role != "gradient" or self.flow.values[value].final else "activation"

    def _hold(self) -> None:
        """What others read stays as long as they made it stay."""
        for value, made in self.made.items():
            if not self.flow.values[value].final:
                continue
            before = self.old.storages[self.flow.values[value].storage]
            if value in self.eager:
                self.last[value] = max(self.last[value], self._moved(before.last))
                continue
            if value in self.read_eagerly and made < self.forward_ends:  # Python may hold it longer than it is read
                self.last[value] = max(self.last[value], min(self._moved(before.last), self.forward_ends - 1))
            if value in self.flow.handed_on:
                if before.last < self.old_forward_ends:
                    stays = self.forward_ends - 1
                elif before.last == self.old_forward_ends:
                    stays = self.forward_ends
                else:
                    stays = self._moved(before.last)
                self.last[value] = max(self.last[value], stays)
            elif made >= self.forward_ends and before.last >= self.old_ends:
                self.last[value] = self.ends
            elif value in self.left:
                self.last[value] = self.ends - 1

    def _moved(self, number: int) -> int:
        """Where an operator of the part is now, or the one before it that is."""
        if number >= self.old_ends:
            return self.ends
        before = bisect_right(self.known_places, number)
        place = max((self.places[n] for n in self.known_places[:before]), default=0)
        return max(place, self.forward_ends) if number >= self.old_forward_ends else place

    def _storage(self, value: int) -> Storage | None:
        amount, number = self.flow.values[value].bytes, self.flow.values[value].storage
        before = self.old.storages[number]
        if value in self.made:
            if amount.fixed <= 0 and amount.per_sample <= 0:
                return None
            return replace(before, bytes=amount, made=self.made[value], last=self.last[value], role=self._role(value))
        return self._given(before, self.last.get(value))

    def _given(self, before: Storage, last: int | None) -> Storage:
        made = before.made if before.made <= 0 else self.forward_ends
        return replace(before, made=made, last=max(made, self._moved(before.last) if last is None else last))

    def _beside(self) -> Iterable[Storage]:
        """What libraries ask for while they run, and what merely waits while the part runs."""
        named = {value.storage for value in self.flow.values} | self.flow.merged
        for number, kernel in enumerate(self.kernels):
            if (copies := _aligned_copies(kernel.operator)) != NOTHING:
                yield Storage(copies, number, number, "workspace", kernel.operator.divides, kernel.operator.expert)
        for number, storage in enumerate(self.old.storages):
            if storage.role == "workspace":
                place = self.places.get(storage.made)
                if place is not None and not self.kernels[place].in_place:  # its own kernels need none
                    yield replace(storage, made=place, last=place)
            elif number not in named and storage.role != "copy":  # autocast has no cache inside compiled code
                yield self._given(storage, None)
