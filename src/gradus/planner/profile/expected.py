"""Expected values: what operators return that depend on numbers, where there are only shapes.

A few things are known without numbers. An index that `topk` returned is one of so many; a mask that compares it with
one of them is true for its even share; counts of such indices add up to their number; random numbers are 0.5, and none
is infinite. These expectations stay with the tensors through views and casts. Where nothing is known, a number is 1,
and a mask is true everywhere.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Expectation:
    among: int | None = None  # the elements are indices of one of so many
    share: float | None = None  # of the elements that are true
    total: int | None = None  # the elements are counts that add up to this
    ends: bool = False  # they are added up, as the ends of the pieces that are counted
    value: float | None = None  # of each element


NOTHING_KNOWN = Expectation()
_MARK = "_gradus_expectation"

_WITH_VALUES = {"topk", "sort", "max", "min", "kthvalue", "mode"}  # or values alone
_INDICES = _WITH_VALUES | {"argsort", "argmax", "argmin", "multinomial"}
_COUNTS = {"bincount", "histc"}
_COMPARED: dict[str, Callable[[float, float], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_COMBINED: dict[str, Callable[..., float]] = dict.fromkeys(("__or__", "logical_or", "bitwise_or"), max)
_COMBINED |= dict.fromkeys(("__and__", "logical_and", "bitwise_and"), min)
_COMPARED |= {"less": operator.lt, "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge}
# What comes out has the numbers, or an even sample of the numbers, that went in.
_VIEWS = {"__getitem__", "permute", "transpose", "t", "view", "view_as", "reshape", "flatten", "unflatten", "squeeze"}
_VIEWS |= {"unsqueeze", "select", "narrow", "expand", "expand_as", "split", "chunk", "movedim", "swapaxes", "ravel"}
_COPIES = {"to", "bool", "int", "long", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone"}
_COPIES |= {"detach", "index_select", "gather", "repeat", "repeat_interleave", "flip", "roll", "tile", "broadcast_to"}
_SAME_NUMBERS = _VIEWS | _COPIES


def expectation(tensor: Any) -> Expectation:
    return getattr(tensor, _MARK, NOTHING_KNOWN)


def expect(result: Any, known: Expectation) -> None:
    """Writes down what is known about a tensor, or about each of several."""
    if known == NOTHING_KNOWN:
        return
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(tensor, Tensor):
            setattr(tensor, _MARK, known)


def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """After each function that a model calls: what follows from its arguments for its result."""
    first = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
    if name in _INDICES:
        _note_indices(name, args, kwargs, first, result)
        return
    if (compare := _COMPARED.get(name.strip("_"))) is not None:
        _note_comparison(compare, args, result)
        return
    known = expectation(first)
    if name in ("rand", "rand_like"):
        expect(result, Expectation(value=0.5))
    elif name in ("isnan", "isinf", "isfinite"):
        expect(result, Expectation(share=float(name == "isfinite")))
    elif name in ("scatter", "scatter_") and len(args) > 2 and expectation(args[2]).among:
        expect(result, Expectation(share=args[2].numel() / max(1, result.numel())))  # marks what was chosen
    elif (combine := _COMBINED.get(name)) is not None:
        shares = [e.share for e in map(expectation, args[:2])]
        if None not in shares:
            expect(result, Expectation(share=combine(share for share in shares if share is not None)))
    elif name == "one_hot":
        expect(result, Expectation(share=1 / max(1, result.shape[-1])))
    elif name in _COUNTS and isinstance(first, Tensor):
        expect(result, _counts(first.numel(), result))
    elif known == NOTHING_KNOWN:
        return
    elif name in _SAME_NUMBERS:
        expect(result, known)
    elif name == "unbind" and isinstance(result, (tuple, list)):
        for number, tensor in enumerate(result):
            expect(tensor, replace(known, value=_element(known, number, len(result))))
    elif name in ("__invert__", "logical_not", "bitwise_not") and known.share is not None:
        expect(result, Expectation(share=1 - known.share))
    elif name in ("any", "all") and known.share is not None:
        expect(result, Expectation(share=float(known.share > 0 if name == "any" else known.share >= 1)))
    elif name == "cumsum" and known.total is not None:
        expect(result, replace(known, ends=True, value=None))
    elif name == "sum" and known.share is not None and isinstance(first, Tensor):
        expect(result, _counts(round(known.share * first.numel()), result))


def _note_comparison(compare: Callable[[float, float], bool], args: tuple[Any, ...], result: Any) -> None:
    among = next((e.among for e in map(expectation, args[:2]) if e.among), None)
    if among and compare in (operator.eq, operator.ne):
        expect(result, Expectation(share=1 / among if compare is operator.eq else 1 - 1 / among))
    elif isinstance(result, Tensor) and result.numel() == 1 and len(args) > 1:
        tensor, other = args[:2]
        if isinstance(tensor, Tensor) and isinstance(other, (int, float)):
            expect(result, Expectation(share=float(compare(_expected_number(tensor), other))))


def _expected_number(tensor: Tensor) -> float:
    known = expectation(tensor)
    if known.value is not None:
        return known.value
    return 1 if known.among is None else 0  # of so many, the first is there however many there are


def _counts(total: int, result: Tensor) -> Expectation:
    return Expectation(total=total, value=total // max(1, result.numel()))


def _note_indices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], first: Any, result: Any) -> None:
    if not isinstance(first, Tensor) or first.ndim == 0 or (name in _WITH_VALUES and not isinstance(result, tuple)):
        return
    place = 2 if name in ("topk", "kthvalue") else 1
    dim = args[place] if len(args) > place else kwargs.get("dim", -1)
    if name == "multinomial" or not isinstance(dim, int):
        dim = -1
    expect(result[1] if isinstance(result, tuple) else result, Expectation(among=first.shape[dim]))


def _element(known: Expectation, number: int, count: int) -> float | None:
    """One of the counts, or ends, if all are as even as can be."""
    if known.total is None:
        return known.value
    size, rest = divmod(known.total, count)
    return (number + 1) * size + min(number + 1, rest) if known.ends else size + (number < rest)


def as_expected(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator whose result depends on numbers; NotImplemented if it is none of those."""
    answer = _ANSWERS.get(getattr(func, "overloadpacket", func))
    return NotImplemented if answer is None else answer(func, args, kwargs)


def _scalar(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    known = expectation(tensor)
    if tensor.dtype == torch.bool:
        return known.share is None or known.share >= 0.5
    number = _expected_number(tensor)
    return complex(number) if tensor.is_complex() else float(number) if tensor.is_floating_point() else int(number)


def _rows(mask: Tensor) -> int:
    share = expectation(mask).share
    return mask.numel() if share is None else min(mask.numel(), max(1, round(share * mask.numel())))


def _nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    mask = args[0]
    result: Tensor = mask.new_empty((mask.ndim, _rows(mask)), dtype=torch.int64).t()  # as CUDA lays it out
    if mask.ndim == 1:
        expect(result, Expectation(among=len(mask)))
    return result


def _masked_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, mask = args
    size = math.prod(torch.broadcast_shapes(tensor.shape, mask.shape))  # type: ignore[no-untyped-call]
    result: Tensor = tensor.new_empty(size * _rows(mask) // max(1, mask.numel()))
    return result


def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Masks among the indices are replaced by the indices of what they choose."""
    tensor, indices = args[0], args[1]
    if not any(_is_mask(index) for index in indices):
        return NotImplemented
    plain: list[Any] = []
    for index in indices:
        if _is_mask(index):
            rows = _rows(index)
            plain.extend(index.new_empty(rows, dtype=torch.int64) for _ in range(index.ndim))
        else:
            plain.append(index)
    return func(tensor, plain, *args[2:], **kwargs)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _bincount(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    minimum = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    dtype = torch.int64 if weights is None else torch.float64
    result: Tensor = args[0].new_empty(max(minimum, expectation(args[0]).among or 1), dtype=dtype)
    return result


def _unique(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """All different, unless there are fewer numbers to choose from."""
    tensor = args[0]
    count = min(tensor.numel(), expectation(tensor).among or tensor.numel())
    inverse, counts = tensor.new_empty(tensor.shape, dtype=torch.int64), tensor.new_empty(count, dtype=torch.int64)
    return tensor.new_empty(count), inverse, counts


def _repeat_interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    repeats: Tensor = args[0]
    if func is not aten.repeat_interleave.Tensor:
        return NotImplemented
    size = kwargs.get("output_size")
    if size is None:
        size = expectation(repeats).total or repeats.numel()
    return repeats.new_empty(size, dtype=torch.int64)


def _grouped_mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """This one needs no numbers, but torch refuses to trace it in formats other than bf16, which CUDA takes."""
    a, b = args[0], args[1]
    offs: Any = args[2] if len(args) > 2 else kwargs.get("offs")
    dtype = args[4] if len(args) > 4 else kwargs.get("out_dtype")
    size: tuple[int, ...]
    if a.ndim == b.ndim == 2:
        size = (len(offs), a.shape[0], b.shape[1])
    elif a.ndim == b.ndim:
        size = (*a.shape[:2], b.shape[2])
    else:
        size = (a.shape[-2], b.shape[-1])
    result: Tensor = a.new_empty(size, dtype=dtype or a.dtype)
    return result


def _ctc_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A loss for each sample, and the scores of all paths: a state for each label, and for the gaps around them."""
    scores, labels = args[0], args[1]
    samples = () if scores.ndim == 2 else (scores.shape[1],)
    longest = labels.shape[-1] if labels.ndim == 2 else labels.numel() // math.prod(samples)
    return scores.new_empty(samples), scores.new_empty((*samples, scores.shape[0], 2 * longest + 1))


def _yes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return True


_ANSWERS = {
    aten._local_scalar_dense: _scalar,
    aten.nonzero: _nonzero,
    aten.masked_select: _masked_select,
    aten.index: _index,
    aten.bincount: _bincount,
    aten._unique2: _unique,
    aten.unique_consecutive: _unique,
    aten.repeat_interleave: _repeat_interleave,
    aten.equal: _yes,
    aten._ctc_loss: _ctc_loss,
    aten._grouped_mm: _grouped_mm,
}
