"""Assembly: the records of two passes, with few and with more samples, as one program whose sizes grow with them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from gradus.planner.profile.program import Amount, Divides, Operator, Part, Storage, Weights
from gradus.planner.profile.recording import Call, Piece, Recorder


@dataclass(frozen=True)
class Facts:
    """Of parameters, by identity."""

    styles: Mapping[int, str]
    experts: frozenset[int]


# The parts, the calls of them in the order of forward, and of these calls the blocks: None around the blocks.
Assembled = tuple[list[Part], list[int], list[nn.Module | None]]


def in_proportion(record: Recorder, samples: int, facts: Facts) -> Assembled:
    """Of one pass only: everything but what belongs to parameters grows with the samples."""
    return _assembled(record, record, _Line(0, samples, only_one=True), facts)


def alike(few: Recorder, more: Recorder) -> bool:
    """Whether both passes ran the same operators in the same order, so that sizes can be read from the two."""
    of_few, of_more = ([(s.name, s.call, s.backward) for s in record.steps] for record in (few, more))
    return of_few == of_more and len(few.calls) == len(more.calls)


def assembled(few: Recorder, more: Recorder, samples: tuple[int, int], facts: Facts) -> Assembled:
    """Of two passes that are alike."""
    return _assembled(few, more, _Line(*samples), facts)


def _assembled(few: Recorder, more: Recorder, line: _Line, facts: Facts) -> Assembled:
    owned = _weights_by_call(few, facts)
    windows = _windows(few)
    parts: list[Part] = []
    numbers: dict[int, int] = {}  # of parts, by the call that they were made from
    local_of: dict[int, dict[int, int]] = {}  # the same for their storages, by those of the record
    calls: list[int] = []
    modules: list[nn.Module | None] = []
    for number, call in enumerate(few.calls):
        if call.like is not None:
            numbers_of_like = _ghosted(parts, numbers, call, owned[number])
            calls.append(_with_results_of(parts, numbers_of_like, few, number, call.like, local_of[call.like]))
            modules.append(call.module)
            continue
        if number not in windows and not owned[number]:
            continue
        part, local_of[number] = _part(few, more, number, windows, line)
        same = _same_as(part, owned[number], parts, numbers, few.calls, call)
        if same is None:
            parts.append(replace(part, weights=owned[number]))
            same = len(parts) - 1
        numbers[number] = same
        calls.append(same)
        modules.append(call.module)
    return parts, calls, modules


def with_eager_operators(part: Part, compiled: Collection[str], left_out: Collection[str] = ()) -> Part:
    """The part, with operators marked that no compiler sees: losses, what joins modules, and what is left out.

    The modules that are compiled and those that are left out may be inside of each other: the innermost counts.
    """
    if part.block:
        return part

    def is_eager(operator: Operator) -> bool:
        holders = [
            name for name in (*compiled, *left_out) if f"{operator.module}.".startswith(f"{name}." if name else "")
        ]
        return not holders or max(holders, key=len) in left_out

    def marked(operator: Operator) -> Operator:
        return replace(operator, eager=True) if is_eager(operator) else operator

    return replace(part, forward=tuple(map(marked, part.forward)), backward=tuple(map(marked, part.backward)))


def _ghosted(parts: list[Part], numbers: dict[int, int], call: Call, weights: tuple[Weights, ...]) -> int:
    """A ghost is called under the number of what it is like; with other weights (tied ones) it is another part."""
    assert call.like is not None
    like = numbers[call.like]
    return like if parts[like].weights == weights else _number_of(parts, replace(parts[like], weights=weights))


def _number_of(parts: list[Part], wanted: Part) -> int:
    """The number of such a part, which is added if it is new."""
    for number, part in enumerate(parts):
        if part == wanted:
            return number
    parts.append(wanted)
    return len(parts) - 1


def _with_results_of(
    parts: list[Part], like: int, record: Recorder, number: int, first: int, local: Mapping[int, int]
) -> int:
    """A call that is like the `first` of its kind, but for what becomes of its results: the last of many blocks hands
    them to something else, which may keep them for backward where the next block does not, or the other way round."""
    part = parts[like]
    ends = len(part.forward)
    read = {storage for operator in part.backward for storage in operator.reads}
    storages = list(part.storages)
    for own, other in zip(record.calls[first].results, record.calls[number].results, strict=True):
        place = local.get(own)
        if place is None or place in read or storages[place].made < 0 or other in record.unseen:
            continue
        stays, stays_here = (_outlives_forward(record, record.pieces[n]) for n in (own, other))
        if stays != stays_here:
            storages[place] = replace(storages[place], last=ends if stays_here else max(storages[place].made, ends - 1))
    return like if tuple(storages) == part.storages else _number_of(parts, replace(part, storages=tuple(storages)))


def _outlives_forward(record: Recorder, piece: Piece) -> bool:
    return piece.last is None or piece.last >= record.backward_begins


def _same_as(
    part: Part,
    weights: tuple[Weights, ...],
    parts: list[Part],
    numbers: dict[int, int],
    calls: list[Call],
    call: Call,
) -> int | None:
    """The second of several like blocks ran as well, and is not another part for that."""
    if not call.block:
        return None
    for earlier, number in numbers.items():
        known = parts[number]
        alike = calls[earlier].block and known.weights == weights and len(known.operators) == len(part.operators)
        if alike and all(
            a.name == b.name and a.read == b.read for a, b in zip(known.operators, part.operators, strict=True)
        ):
            return number
    return None


@dataclass(frozen=True)
class _Line:
    """Through the two numbers of samples."""

    few: int
    more: int
    only_one: bool = False  # a line from nothing through the larger pass

    def through(self, a: float, b: float) -> Amount:
        if self.only_one:
            return Amount(0.0, b / self.more)
        slope = (b - a) / (self.more - self.few)
        fixed = a - slope * self.few
        if fixed < 0:  # grows faster than in proportion: as if in proportion, from the larger pass
            return Amount(0.0, b / self.more)
        return Amount(fixed, slope)

    def shape(self, few: Sequence[float], more: Sequence[float]) -> tuple[Amount, ...]:
        """Of one pass alone, the first dimension that the samples divide is taken to be theirs."""
        if not self.only_one:
            return tuple(self.through(a, b) for a, b in zip(few, more, strict=True))
        theirs = next((n for n, size in enumerate(more) if size and size % self.more == 0), 0)
        return tuple(Amount(0.0, size / self.more) if n == theirs else Amount(size) for n, size in enumerate(more))


@dataclass(frozen=True)
class _Window:
    """The operators of a call: where they are in the whole pass, and in the part."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def local(self, step: int) -> int:
        """The number in the part of the last of its operators that is not after `step` of the whole pass."""
        if self.backward and step >= self.backward[0]:
            return len(self.forward) + bisect_right(self.backward, step) - 1
        return bisect_right(self.forward, step) - 1


def _windows(record: Recorder) -> dict[int, _Window]:
    forward: dict[int, list[int]] = {}
    backward: dict[int, list[int]] = {}
    for number, step in enumerate(record.steps):
        (backward if step.backward else forward).setdefault(step.call, []).append(number)
    return {
        call: _Window(tuple(forward.get(call, ())), tuple(backward.get(call, ()))) for call in {*forward, *backward}
    }


def _part(
    few: Recorder, more: Recorder, number: int, windows: Mapping[int, _Window], line: _Line
) -> tuple[Part, dict[int, int]]:
    """The part, and its storages by the numbers of the record."""
    call, larger = few.calls[number], more.calls[number]
    window = windows.get(number, _Window((), ()))
    storages: list[Storage] = []
    local: dict[int, int] = {}  # storages of the part, by the number of the piece
    used = {read for step in (*window.forward, *window.backward) for read in few.steps[step].reads}
    logits = _logits_elements(few, window) if number == _last_call(few) else None
    for index, (piece, other) in enumerate(zip(few.pieces, more.pieces, strict=True)):
        kept = _storage(few, piece, number, window, index in used)
        if kept is None or (piece.role == "workspace" and not other.bytes):  # with more samples it is not needed
            continue
        made, last = kept
        role = piece.role
        if role == "activation" and logits is not None and piece.elements == logits:
            role = "logits"
        local[index] = len(storages)
        storages.append(
            Storage(
                bytes=Amount(piece.bytes) if role in ("copy", "gradient") else line.through(piece.bytes, other.bytes),
                made=made,
                last=last,
                role=role,
                divides=_divides(piece),
                expert=piece.expert,
                from_samples=piece.from_samples,
            )
        )

    def operator(step: int) -> Operator:
        small, large = few.steps[step], more.steps[step]
        return Operator(
            name=small.name,
            kind=small.work.kind,
            flops=line.through(small.work.flops, large.work.flops),
            read=line.through(small.read, large.read),
            written=line.through(small.written, large.written),
            dtype=small.dtype,
            shape=line.shape(small.work.shape, large.work.shape),
            kernels=small.work.kernels,
            reads=tuple(local[n] for n in small.reads if n in local),
            writes=tuple(local[n] for n in small.writes if n in local),
            divides="tensor" if small.split else "sequence",
            expert=small.expert,
            causal=small.work.causal,
            channels_last=small.channels_last,
            module=small.module,
            turned=line.through(small.turned, large.turned),
        )

    part = Part(
        name=call.name,
        block=call.block,
        forward=tuple(map(operator, window.forward)),
        backward=tuple(map(operator, window.backward)),
        storages=tuple(storages),
        output=line.through(call.output, larger.output),
        gathered=tuple(line.through(a, b) for a, b in zip(call.gathered, larger.gathered, strict=True)),
        scattered=tuple(line.through(a, b) for a, b in zip(call.scattered, larger.scattered, strict=True)),
        keys_and_values=line.through(call.keys_and_values, larger.keys_and_values),
        waits=call.waits,
        sent_to_experts=line.through(call.sent_to_experts, larger.sent_to_experts),
    )
    return part, local


def _divides(piece: Piece) -> Divides:
    if piece.split or piece.layer is not None:
        return "tensor"
    return "whole" if piece.parameter or piece.role == "copy" or piece.from_samples else "sequence"


def _storage(record: Recorder, piece: Piece, number: int, window: _Window, used: bool) -> tuple[int, int] | None:
    """When a piece of memory comes and goes in terms of a part; None where it is none of this part's business."""
    if piece.parameter or not (window.forward or window.backward):
        return None
    ends = len(record.steps)
    last = ends if piece.last is None else piece.last
    before_backward = record.backward_begins
    if piece.made_in == number:
        return _own(piece, last, before_backward, window, ends)
    first = window.forward[0] if window.forward else window.backward[0]
    if piece.made < 0 or piece.role == "gradient":
        return (-1, window.local(last)) if first <= last and piece.made < 0 and used else None
    # What another part made. It counts there, as long as that part's own pass lasts; what goes while this part runs
    # counts here until then.
    if window.forward and piece.made < window.forward[0] <= last <= window.forward[-1]:
        return 0, window.local(last)
    made_backward = piece.made >= before_backward
    if made_backward and window.backward and piece.made < window.backward[0] <= last <= window.backward[-1]:
        return len(window.forward), window.local(last)
    return (-1, len(window.forward)) if used else None


def _own(piece: Piece, last: int, before_backward: int, window: _Window, ends: int) -> tuple[int, int]:
    operators = len(window.forward) + len(window.backward)
    # Memory may be asked for before the first operator that writes to it.
    made = max(0, window.local(piece.made))
    if piece.made >= before_backward:
        made = max(made, len(window.forward))
        if piece.role == "gradient" or last >= ends:
            return made, operators
        return made, max(made, min(window.local(last), operators - 1))
    forward_ends = len(window.forward) - 1
    if last < before_backward:  # gone before backward: with this part, or after it where others used it
        return made, max(made, min(window.local(last), forward_ends))
    if not window.backward or last < window.backward[0]:
        return made, len(window.forward)
    return made, operators if last >= ends else max(made, window.local(last))


def _last_call(record: Recorder) -> int:
    forward = [step.call for step in record.steps if not step.backward]
    return forward[-1] if forward else -1


def _logits_elements(record: Recorder, window: _Window) -> int | None:
    """How many numbers the last product of forward has, if the loss follows it in this part."""
    for number in reversed(window.forward):
        step = record.steps[number]
        if step.work.kind == "matmul" and step.writes:
            return record.pieces[step.writes[0]].elements
    return None


def _weights_by_call(record: Recorder, facts: Facts) -> list[tuple[Weights, ...]]:
    """The parameters of each call, of parameters that several have, in the first of them. What is in no block belongs
    to the part around the blocks that first uses it."""
    counted: set[int] = set()
    found: list[tuple[Weights, ...]] = []
    for call in record.calls:
        modules = [call.module] if call.module is not None else []
        parameters = [p for module in modules for p in module.parameters() if id(p) not in counted]
        counted |= {id(p) for p in parameters}
        found.append(_added_up(parameters, facts))
    for parameter, calls in record.users():
        if id(parameter) not in counted:
            counted.add(id(parameter))
            first = calls[0] if calls else 0
            found[first] = _merged(found[first], _added_up([parameter], facts))
    return found


def tied_elements(record: Recorder) -> tuple[int, int]:
    """Of parameters that are used at both ends of a model, which a pipeline has twice: all, and those trained."""
    tied = [parameter for parameter, calls in record.users() if calls and calls[0] != calls[-1]]
    return sum(p.numel() for p in tied), sum(p.numel() for p in tied if p.requires_grad)


def _added_up(parameters: list[nn.Parameter], facts: Facts) -> tuple[Weights, ...]:
    found: tuple[Weights, ...] = ()
    for parameter in parameters:
        one = Weights(
            elements=parameter.numel(),
            trained=parameter.requires_grad,
            divides="tensor" if id(parameter) in facts.styles else "whole",
            expert=id(parameter) in facts.experts,
        )
        found = _merged(found, (one,))
    return found


def _merged(some: tuple[Weights, ...], others: tuple[Weights, ...]) -> tuple[Weights, ...]:
    sums = {(w.trained, w.divides, w.expert): w for w in some}
    for weights in others:
        key = (weights.trained, weights.divides, weights.expert)
        known = sums.get(key)
        if known is not None:
            weights = replace(
                weights, elements=weights.elements + known.elements, tensors=weights.tensors + known.tensors
            )
        sums[key] = weights
    return tuple(sums.values())
