"""Recording: every operator that runs on fake tensors, and when each piece of memory comes and goes.

Below autograd, so that what backward does is seen as well. Nothing is computed, and nothing is kept but sizes.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradus.planner.profile.mixed_formats import check_formats
from gradus.planner.profile.operators import Work, name_of, work_of
from gradus.planner.profile.program import Role

# What an operator gives whose result depends on values, which are not there; or NotImplemented.
Expected = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# What a library needs besides: bytes, and the samples of a micro-batch from which on it needs them.
Workspace = Callable[[str, tuple[Any, ...], dict[str, Any], Any], Iterable[tuple[int, float]]]


@dataclass
class Piece:
    """A storage, as it was seen."""

    bytes: int
    elements: int
    made: int  # number of the operator, counted over the whole pass; -1: it was there before
    made_in: int  # the call, see `Call`
    last: int | None = None  # the last operator before it went; None: still there
    role: Role = "activation"
    layer: str | None = None  # of a parameter that is divided over a tensor group, and of copies of it: its style
    parameter: bool = False
    table: bool = False  # of embeddings, or a copy of one
    expert: bool = False
    split: bool = False  # a rank of a tensor group has a part of it
    from_samples: float = 0.0  # of a micro-batch, from which on it is needed


@dataclass(frozen=True)
class Step:
    """An operator, as it ran."""

    name: str
    work: Work
    dtype: str
    read: int
    written: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    call: int
    module: str  # that it runs in, by its name in the model; in backward, the one whose forward it undoes
    backward: bool
    split: bool
    expert: bool
    channels_last: bool
    turned: int


@dataclass
class Call:
    """A call of a part: of a block, or of what is between two of them."""

    name: str
    block: bool
    like: int | None = None  # an earlier call that it is like, so that it was not run
    first_sequence: int = 0
    output: int = 0  # bytes
    gathered: list[int] = field(default_factory=list)  # bytes
    scattered: list[int] = field(default_factory=list)
    keys_and_values: int = 0
    sent_to_experts: int = 0
    waits: int = 0  # how often the host reads a value in forward, and waits for it
    results: list[int] = field(default_factory=list)  # of a block: the storages that it returns, by number
    module: nn.Module | None = None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, everything that runs goes into `steps`, `pieces` and `calls`."""

    def __init__(self, expected: Expected, workspace: Workspace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.pieces: list[Piece] = []
        self.calls: list[Call] = []
        self.parameters: list[tuple[nn.Parameter, int]] = []  # each with the number of its storage
        self.unseen: set[int] = set()  # storages that ghosts were given
        self._added: set[int] = set()
        self.backward = False
        self.backward_begins = 0  # number of the first operator of backward
        self._expected = expected
        self._workspace = workspace
        self._numbers: dict[int, int] = {}  # of living storages: their address, and their number among the pieces
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._paused = False
        self._latest = 0  # the call whose backward is running
        self._places: list[tuple[int, str]] = [(0, "")]  # the module that runs from this autograd node on
        self._entered: Piece | None = None  # what was last handed to layers that are divided by their outputs

    # --- calls

    def enter(self, call: Call) -> int:
        call.first_sequence = _next_node()
        self.calls.append(call)
        return len(self.calls) - 1

    @contextmanager
    def naming(self, model: nn.Module) -> Iterator[None]:
        """Inside, operators are put down to the modules of the model that run them."""
        names = {module: name for name, module in model.named_modules()}
        running = [""]

        def entered(module: nn.Module, inputs: Any) -> None:
            running.append(names.get(module, running[-1]))
            self._places.append((_next_node(), running[-1]))

        def left(module: nn.Module, inputs: Any, output: Any) -> None:
            running.pop()
            self._places.append((_next_node(), running[-1]))

        handles = [register_module_forward_pre_hook(entered), register_module_forward_hook(left, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def _call(self) -> int:
        """The call that is running; in backward, the one whose forward is being undone."""
        if self.backward and (node := self._node()) is not None:
            self._latest = bisect_right(self.calls, node, key=lambda call: call.first_sequence) - 1
        return self._latest if self.backward else len(self.calls) - 1

    @property
    def _module(self) -> str:
        if not self.backward:
            return self._places[-1][1]
        if (node := self._node()) is not None:
            self._latest_module = self._places[bisect_right(self._places, node, key=lambda place: place[0]) - 1][1]
        return self._latest_module

    def _node(self) -> int | None:
        """The number of the autograd node that is running; None for those that only add to a gradient."""
        node: Any = torch._C._current_autograd_node()  # private, as are the numbers
        if node is None or node._sequence_nr() > self.calls[-1].first_sequence + 2**40:
            return None
        return int(node._sequence_nr())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, what runs is not recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def begin_backward(self) -> None:
        self.backward, self.backward_begins = True, len(self.steps)
        self._latest, self._latest_module = len(self.calls) - 1, ""

    # --- storages

    def add(self, tensor: Tensor) -> Piece:
        """A parameter or a buffer."""
        number = self._number(tensor, made=-1, made_in=-1, parameter=True)
        if isinstance(tensor, nn.Parameter) and id(tensor) not in self._added:
            self._added.add(id(tensor))  # which stays its own, since it is kept
            self.parameters.append((tensor, number))
        return self.pieces[number]

    def users(self) -> list[tuple[nn.Parameter, list[int]]]:
        """Each parameter with the calls that use it in forward, itself or a copy of it."""
        sources: dict[int, int] = {}  # of copies: what they were made from
        calls: dict[int, list[int]] = {}
        for step in self.steps:
            if step.backward:
                break
            for read in step.reads:
                calls.setdefault(sources.get(read, read), []).append(step.call)
            for written in step.writes:
                if self.pieces[written].role == "copy":
                    sources[written] = sources.get(step.reads[0], step.reads[0])
        return [(p, sorted(set(calls.get(number, [])))) for p, number in self.parameters]

    def hand_to_ghost(self, tensors: Iterable[Any]) -> None:
        """Ghosts keep nothing: what a block in their place would do with these is not seen."""
        known = (self._numbers.get(t.untyped_storage()._cdata) for t in tensors if isinstance(t, Tensor))
        self.unseen |= {number for number in known if number is not None}

    def returned(self, call: Call, results: Iterable[Any]) -> None:
        """What a block returns: what becomes of it, the call itself does not tell. A ghost has made nothing else."""
        number = next(n for n, known in enumerate(self.calls) if known is call)
        for tensor in results:
            if isinstance(tensor, Tensor):
                call.results.append(self._number(tensor, made=len(self.steps), made_in=number))

    def piece(self, tensor: Tensor) -> Piece | None:
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        return None if number is None else self.pieces[number]

    def _number(self, tensor: Tensor, *, made: int, made_in: int, **facts: Any) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            elements = storage.nbytes() // max(1, tensor.element_size())
            self.pieces.append(Piece(storage.nbytes(), elements, made, made_in, **facts))
            number = len(self.pieces) - 1
            self._numbers[key] = number

            def gone(_: Any) -> None:
                self._numbers.pop(key, None)
                self._watched.pop(key, None)
                self.pieces[number].last = len(self.steps) - 1

            self._watched[key] = weakref.ref(storage, gone)
        return self._numbers[key]

    # --- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        check_formats(func, name_of(func), args)
        out = self._expected(func, args, kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
        if not self._paused:
            self._record(func, args, kwargs, out)
        return out

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {t.untyped_storage()._cdata for t in inputs}
        fresh = [t for t in results if t.untyped_storage()._cdata not in known]
        name = name_of(func)
        mutates = func._schema.is_mutable and not name.startswith(("detach", "set_", "resize"))
        if name in _READ_BY_HOST and not self.backward and self.calls:
            self.calls[-1].waits += 1
        if not results and not mutates:
            return
        if not fresh and not mutates:
            return  # a view
        here = len(self.steps)
        if name in _ALLOCATES:
            for tensor in fresh:
                self._number(tensor, made=here, made_in=self._call)
            return
        if "out" in kwargs:  # which is written to, and read where it is an argument besides
            inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        written = kwargs.get("out", args[0] if args else None)
        changed = fresh + ([written] if mutates and isinstance(written, Tensor) else [])
        self._append(func, name, args, kwargs, out, inputs, changed)

    def _append(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: list[Tensor],
        changed: list[Tensor],
    ) -> None:
        here, call = len(self.steps), self._call
        work = work_of(func, args, kwargs, out)
        distinct = list({(t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape)): t for t in inputs}.values())
        sources = [self._number(t, made=-1, made_in=-1) for t in distinct]
        read_pieces = [self.pieces[number] for number in sources]
        split_work, split_result = self._split(read_pieces, work)
        expert = any(piece.expert for piece in read_pieces)  # which parameters of experts are, and copies of them
        only_parameters = bool(read_pieces) and all(piece.parameter or piece.role == "copy" for piece in read_pieces)
        copies = only_parameters and work.kind == "copy"
        targets = []
        for tensor in changed:
            number = self._number(tensor, made=here, made_in=call)
            piece = self.pieces[number]
            if piece.made == here:
                piece.split, piece.expert = split_result, expert
                if copies:
                    piece.role, piece.layer, piece.table = "copy", read_pieces[0].layer, read_pieces[0].table
            targets.append(number)
        if not self.backward:
            self._note_exchanges(self.calls[call], work, read_pieces, distinct, changed)
        # Written over in place, or handed out as a view of what it came from: it is read and written once.
        floats = [t for t in (*changed, *distinct) if t.is_floating_point()]
        widest = work.kind in ("matmul", "attention", "convolution", "recurrent")
        # The narrowest: products of 16 bits may be added to a sum of 32.
        operand = min((t for t in distinct if t.is_floating_point()), key=_size, default=None) if widest else None
        dtype = (operand if operand is not None else floats[0] if floats else changed[0]).dtype
        self.steps.append(
            Step(
                name=name,
                work=work,
                dtype=str(dtype).removeprefix("torch."),
                read=sum(map(_touched, distinct)),
                written=sum(map(_touched, changed)),
                reads=tuple(sources),
                writes=tuple(targets),
                call=call,
                module=self._module,
                backward=self.backward,
                split=split_work,
                expert=expert,
                channels_last=any(map(_channels_last, distinct)),
                turned=_turned(name, work, distinct, changed),
            )
        )
        for extra, from_samples in self._workspace(name, args, kwargs, out):
            self.pieces.append(
                Piece(
                    extra,
                    extra,
                    here,
                    call,
                    last=here,
                    role="workspace",
                    split=split_work and not from_samples,
                    from_samples=from_samples,
                )
            )

    def _split(self, read: list[Piece], work: Work) -> tuple[bool, bool]:
        """Whether a tensor group divides the work, and whether each of its ranks gets a part of the result.

        A layer whose outputs are divided hands on parts; one whose inputs are divided sums them up. Going backward it
        is the other way round. Anything else makes parts of parts.
        """
        styles = _styles(read, work)
        if styles and any(not (piece.parameter or piece.role == "copy") for piece in read):
            by_outputs = any(style.startswith(("colwise", "vocabulary")) for style in styles)
            return True, by_outputs is not self.backward
        return (any(piece.split or piece.layer is not None for piece in read),) * 2

    def _note_exchanges(
        self, call: Call, work: Work, read: list[Piece], inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """What ranks would have to send each other for this operator, if they divided it."""
        if work.kind == "attention":
            call.keys_and_values += sum(_touched(t) for t in inputs[1:3])
        styles = _styles(read, work)
        data = [
            (piece, t) for piece, t in zip(read, inputs, strict=True) if not piece.parameter and piece.role != "copy"
        ]
        if work.kind in ("matmul", "lookup") and styles and data:
            if any(style.startswith("rowwise") for style in styles):
                call.scattered.append(sum(map(_touched, outputs)))
            elif data[0][0] is not self._entered:  # queries, keys and values are made from one gathered input
                self._entered = data[0][0]
                call.gathered.append(_touched(data[0][1]))
        if any(piece.expert and piece.parameter for piece in read) and data and not call.sent_to_experts:
            # All rows that go to experts, of which this one may get some only.
            call.sent_to_experts = sum(piece.bytes for piece, _ in data)


_READ_BY_HOST = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
_ALLOCATES = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


def _styles(read: list[Piece], work: Work) -> set[str]:
    """How the layers that the operator works for are divided.

    A table of embeddings that is the output layer as well is divided by rows of the vocabulary; which of the two it is
    used as, the operator tells.
    """
    styles = {piece.layer for piece in read if piece.layer}
    if work.kind == "matmul" and any(piece.table and piece.layer for piece in read):
        return {"vocabulary"}
    return styles


def _channels_last(tensor: Tensor) -> bool:
    """Whether it is a batch of images whose channels lie side by side, and could lie otherwise."""
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _turned(name: str, work: Work, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes of inputs that are not read in the order in which they lie.

    Copies and pointwise kernels go along the output, products along their inner dimension. Norms of layers and groups
    know one order only, and convolutions that of their weights: they begin with a copy of what lies otherwise (ATen's
    kernels call `contiguous` on it).
    """
    if name.startswith(("native_layer_norm", "native_group_norm", "_fused_rms_norm")):
        return sum(_touched(t) for t in inputs if t.ndim > 1 and not t.is_contiguous())
    if work.kind == "convolution" and any(map(_channels_last, inputs)):
        images = [t for t in inputs if t.ndim == 4]
        return sum(_touched(t) for t in images if not t.is_contiguous(memory_format=torch.channels_last))
    if work.kind == "matmul" and len(inputs) >= 2 and min(t.ndim for t in inputs[-2:]) >= 2:
        left, right = inputs[-2:]
        return _touched(left) * (left.stride(-1) != 1) + _touched(right) * (right.stride(-2) != 1)
    if work.kind not in ("copy", "pointwise") or not outputs:
        return 0
    along = _innermost(outputs[0])
    whole = [t for t in inputs if t.shape == outputs[0].shape]
    return sum(_touched(t) for t in whole if None not in (along, _innermost(t)) and _innermost(t) != along)


def _innermost(tensor: Tensor) -> int | None:
    """The dimension whose elements lie side by side, as far as there is one."""
    wide = [d for d, size in enumerate(tensor.shape) if size > 1]
    found = [d for d in wide if tensor.stride(d) == 1]
    return found[0] if len(wide) > 1 and len(found) == 1 else None


def _next_node() -> int:
    """The number that the next autograd node will get."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _size(tensor: Tensor) -> int:
    return tensor.element_size()


def _touched(tensor: Tensor) -> int:
    """Bytes of distinct elements: what is expanded lies in memory once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return int(elements) * tensor.element_size()
