"""Dataflow: a part's operators as a compiler sees them, with values in place of memory that is written over.

An operator that changes memory in place makes a new value of it. Operators that do two things are taken apart, as
inductor takes them apart: a norm is its statistics and what is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from gradus.planner.profile.program import NOTHING, Amount, Operator, Part

NOMINAL_SAMPLES = 8.0  # where sizes are compared with each other; few comparisons depend on how many samples there are

# How a node runs in compiled code.
#   extern   a kernel of a library, or one that shares nothing with others: it reads and writes memory
#   map      each element by itself: part of whatever kernel needs it
#   rows     a reduction inside a sample, as of a softmax or a layer norm; goes on in the same kernel
#   columns  a reduction over the samples, as of a bias's gradient; ends its kernel
Work = Literal["extern", "map", "rows", "columns"]

_EXTERN_KINDS = ("matmul", "convolution", "attention", "recurrent")
# Kernels of their own, by torch/_inductor/lowering.py of 2.13: scans, sorts, windows, scatters.
_EXTERN = {"cumsum", "cumprod", "bincount", "histc", "nonzero", "sort", "argsort", "topk", "searchsorted", "bucketize"}
_EXTERN |= {"max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward"}
_EXTERN |= {"_adaptive_avg_pool2d", "embedding_dense_backward", "_embedding_bag", "index_put", "index_put_"}
_EXTERN |= {"_unsafe_index_put", "scatter_add", "scatter_add_", "index_add", "index_add_", "gather_backward"}
_EXTERN |= {"index_select_backward", "index_copy", "index_copy_", "multinomial", "randperm"}
_EXTERN |= {"to_float8", "turned_float8"}  # ours
# Not on the list of what torch/_functorch/partitioners.py of 2.13 lets backward compute again.
_ONCE = {"cat", "stack", "constant_pad_nd", "flip", "slice_scatter", "select_scatter", "scatter", "scatter_"}
_TAKES_IN = {"cat", "stack"}  # others write straight into its result, but it goes into no other kernel
_OVER_SAMPLES = ("batch_norm",)
# Backward asks only on which side of a limit a number of forward was.
_ASKS_A_BIT = {"threshold_backward", "leaky_relu_backward", "hardtanh_backward"}
# Of what forward was given, backward needs no more than the shape, and of the gradient, the values.
# (That of a maximum over windows is handed what forward was given, so that it is kept though nothing reads it: compiled
# with torch 2.11, a small convolutional net on an H200 held it. Torch 2.13 takes that backward apart, and keeps less.)
_ASKS_A_SHAPE = {"nll_loss_backward", "_adaptive_avg_pool2d_backward"}
_CAST = "_to_copy"
_SIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
_OFFSET_BYTES = 1 / 8  # of an index: where in its window a maximum was found fits into a byte
_SMALL = 4  # an output that is so many times smaller than the inputs is a reduction, to partitioners.py


@dataclass(frozen=True)
class Value:
    """A tensor that is written once."""

    bytes: Amount
    storage: int  # of the part: the memory that it was in, or whose purpose it shares
    final: bool = True  # whether the memory had no later value

    @property
    def size(self) -> float:
        return self.bytes.at(NOMINAL_SAMPLES)


@dataclass(frozen=True)
class Node:
    """One step of the dataflow."""

    operator: Operator
    number: int  # of the operator in the part
    work: Work
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    shares: tuple[float, ...]  # how much of each value is read: a view is a part of one
    beside: Amount = NOTHING  # bytes read that are no values: of parameters
    again: bool = True  # whether backward may do it once more
    for_backward: bool = False  # forward itself has no use for it

    @property
    def fuses(self) -> bool:
        return self.work != "extern"

    @property
    def fuses_on(self) -> bool:
        """Whether a later step can be part of its kernel."""
        return self.fuses and self.operator.name not in _TAKES_IN


@dataclass
class Flow:
    """A part as nodes and values."""

    values: list[Value] = field(default_factory=list)
    forward: list[Node] = field(default_factory=list)
    recompute: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    given: dict[int, int] = field(default_factory=dict)  # storages that were there, and their values
    final: dict[int, int] = field(default_factory=dict)  # storages, and their last values
    handed_on: set[int] = field(default_factory=set)  # values of forward that other parts get
    merged: set[int] = field(default_factory=set)  # storages that are not there, since another has the same in it

    def new(self, amount: Amount, storage: int, final: bool = True) -> int:
        self.values.append(Value(amount, storage, final))
        return len(self.values) - 1

    def size(self, value: int) -> float:
        return self.values[value].size


def flow_of(part: Part) -> Flow:
    flow = Flow()
    builder = _Builder(part, flow)
    numbered = iter(range(len(part.operators)))
    for operators, nodes in (
        (part.forward, flow.forward),
        (part.recompute, flow.recompute),
        (part.backward, flow.backward),
    ):
        for operator in operators:
            nodes.extend(builder.taken_apart(operator, next(numbered)))
        if operators is part.forward:
            flow.handed_on = _handed_on(part, flow)
            builder.casts.clear()  # what backward casts again, it may have from forward or not: saving.py says it
            builder.ask_for_bits(part.recompute + part.backward)
    return flow


_MakeNode = Callable[[Work, tuple[int, ...], tuple[int, ...]], Node]


class _Builder:
    def __init__(self, part: Part, flow: Flow) -> None:
        self.part = part
        self.flow = flow
        self.bits: dict[int, int] = {}  # values, and those that say on which side of a limit they are
        self.casts: dict[tuple[int, str], int] = {}  # values in a format, by what they were made from

    def _value(self, storage: int) -> int:
        if storage not in self.flow.final:
            value = self.flow.new(self.part.storages[storage].bytes, storage)
            self.flow.final[storage] = self.flow.given[storage] = value
        return self.flow.final[storage]

    def _written(self, storage: int, share: float = 1.0) -> int:
        before = self.flow.final.get(storage)
        if before is not None:
            old = self.flow.values[before]
            self.flow.values[before] = Value(old.bytes, old.storage, final=False)
        value = self.flow.new(self.part.storages[storage].bytes.times(share), storage)
        self.flow.final[storage] = value
        return value

    def ask_for_bits(self, later: tuple[Operator, ...]) -> None:
        for operator in later:
            if operator.name not in _ASKS_A_BIT or operator.eager:
                continue
            ours = [self.flow.final[s] for s in operator.reads if s in self.flow.final]
            if not ours or max(ours, key=self.flow.size) in self.bits:
                continue
            asked = max(ours, key=self.flow.size)
            value = self.flow.values[asked]
            bit = self.flow.new(value.bytes.times(1 / _SIZES.get(operator.dtype, 4)), value.storage, final=False)
            self.bits[asked] = bit
            last = len(self.part.forward) - 1
            self.flow.forward.append(
                Node(_comparison(operator, value), last, "map", (asked,), (bit,), (1.0,), for_backward=True)
            )

    def taken_apart(self, operator: Operator, number: int) -> Iterator[Node]:
        reads = tuple(dict.fromkeys(self._value(storage) for storage in operator.reads))
        if operator.eager:
            results = tuple(map(self._written, operator.writes))
            yield Node(operator, number, "extern", reads, results, tuple(1.0 for _ in reads), again=False)
            return
        if (known := self._known_cast(operator, reads)) is not None:
            self.flow.final.update(dict.fromkeys(operator.writes, known))
            self.flow.merged.update(operator.writes)
            return
        if operator.name in _ASKS_A_BIT:
            reads = tuple(self.bits.get(value, value) for value in reads)
        listed = _sum(self.flow.values[value].bytes for value in reads)
        share = min(1.0, _ratio(operator.read, listed))
        beside = _excess(operator.read, listed)
        if operator.name in _ASKS_A_SHAPE:
            written = operator.written.at(NOMINAL_SAMPLES)
            reads = (*reads[:1], *(value for value in reads[1:] if self.flow.size(value) < written))
            share = 1.0
        elif operator.name == "nll_loss_forward":  # one of each row
            share = 0.0
        given = max(operator.read.at(NOMINAL_SAMPLES), listed.at(NOMINAL_SAMPLES))

        def node(work: Work, values: tuple[int, ...], writes: tuple[int, ...], drawn: bool = False) -> Node:
            shares = tuple(share if value in reads else 1.0 for value in values)
            again = work == "map" and not drawn and operator.name not in _ONCE
            return Node(operator, number, work, values, writes, shares, beside, again)

        if operator.kind in _EXTERN_KINDS or operator.name in _EXTERN:
            pooled = operator.name == "max_pool2d_with_indices"
            writes = [self._written(s, _OFFSET_BYTES if pooled and i else 1.0) for i, s in enumerate(operator.writes)]
            yield node("extern", reads, tuple(writes))
        elif operator.name == "native_dropout":  # what it draws depends on nothing
            result, *mask = (self._written(storage) for storage in operator.writes)
            yield node("map", (), tuple(mask), drawn=True)
            yield node("map", (*reads, *mask), (result,))
        elif operator.kind == "random":
            yield node("map", reads, tuple(self._written(storage) for storage in operator.writes), drawn=True)
        elif operator.kind == "reduction" or operator.name == "nll_loss_forward":
            yield from self._reduction(operator, node, reads, given)
        else:
            results = tuple(self._written(storage) for storage in operator.writes)
            if operator.name == _CAST and len(reads) == len(results) == 1:
                self.casts[reads[0], operator.dtype] = results[0]
            yield node("map", reads, results)

    def _known_cast(self, operator: Operator, reads: tuple[int, ...]) -> int | None:
        """The value of a cast that was done before: a compiler does it once (torch/_functorch/compile_utils.py).

        What else might be done twice is not looked for: operators may work on different views of the same memory.
        """
        if operator.name != _CAST or len(reads) != 1 or operator.read != self.flow.values[reads[0]].bytes:
            return None
        known = self.casts.get((reads[0], operator.dtype))
        return known if known is not None and self.flow.values[known].final else None

    def _reduction(self, operator: Operator, node: _MakeNode, reads: tuple[int, ...], given: float) -> Iterator[Node]:
        """Statistics, and what is made of them element by element."""
        storages = self.part.storages
        grows = any(self.flow.values[value].bytes.per_sample > 0 for value in reads)
        statistics = [s for s in operator.writes if storages[s].bytes.at(NOMINAL_SAMPLES) * _SMALL < given]
        columns = [s for s in statistics if grows and storages[s].bytes.per_sample == 0]
        rows = [s for s in statistics if s not in columns]
        large = [s for s in operator.writes if s not in statistics]
        known: tuple[int, ...] = ()
        if columns:
            over_samples = tuple(self._written(storage) for storage in columns)
            yield node("columns", reads, over_samples)
            if any(name in operator.name for name in _OVER_SAMPLES):
                known = over_samples
        if rows or (large and not known):
            # A softmax keeps none of its statistics in eager mode; they are small beside what they are of.
            hidden = () if rows else (self.flow.new(NOTHING, large[0], final=False),)
            inside = (*(self._written(storage) for storage in rows), *hidden)
            yield node("rows", reads, inside)
            known = (*known, *inside)
        if large:
            yield node("map", (*reads, *known), tuple(self._written(storage) for storage in large))


def _handed_on(part: Part, flow: Flow) -> set[int]:
    """Values of forward that other parts get: results that nothing in it reads, and what stays though nobody reads it.

    What stays to the end of a recomputed part's backward, a checkpoint holds; compiled code has none.
    """
    ends, all_ends = len(part.forward), len(part.operators)
    used = {value for node in flow.forward for value in node.reads}
    later = {storage for operator in part.recompute + part.backward for storage in operator.reads}
    first = {operator.writes[0] for operator in part.forward if operator.writes}
    found = set()
    for number, value in flow.final.items():
        storage = part.storages[number]
        if number in flow.given or storage.role == "copy":
            continue
        stays = storage.last in (ends, all_ends) if part.recompute else storage.last >= ends
        if (number in first and value not in used) or (stays and number not in later):
            found.add(value)
    return found


def _comparison(operator: Operator, value: Value) -> Operator:
    elements = value.bytes.times(1 / _SIZES.get(operator.dtype, 4))
    return Operator(
        name="le",
        kind="pointwise",
        flops=NOTHING,
        read=value.bytes,
        written=elements,
        dtype="bool",
        divides=operator.divides,
        expert=operator.expert,
    )


def _sum(amounts: Iterable[Amount]) -> Amount:
    total = NOTHING
    for amount in amounts:
        total = total.plus(amount)
    return total


def _ratio(amount: Amount, whole: Amount) -> float:
    size = whole.at(NOMINAL_SAMPLES)
    return amount.at(NOMINAL_SAMPLES) / size if size > 0 else 1.0


def _excess(amount: Amount, over: Amount) -> Amount:
    return Amount(max(0.0, amount.fixed - over.fixed), max(0.0, amount.per_sample - over.per_sample))
