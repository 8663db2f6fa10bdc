"""Difference: in what two checkpoints are not the same: names, shapes, numbers, and all that is no tensor.

Tensors are compared one at a time, however they were divided over ranks when they were saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gradus.checkpoint.reading import read_tensor
from gradus.checkpoint.tensor_file import StoredTensor

_AT_ONCE = 1 << 22  # numbers: the sums are taken in 64 bits
_NOT_STATE = ("files", "tensors", "written_at", "state")  # of a manifest: where and when, and what is looked into
_NOTHING = "(nothing)"
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}  # torch compares these

Report = Callable[[int, int | None], None]  # bytes so far, and in all


@dataclass(frozen=True)
class OtherNumbers:
    """A tensor that both have in the same shape and type, with other numbers in it."""

    name: str
    elements: int
    different: int  # how many of them are not equal; NaN is equal to NaN here
    largest: float | None  # |a − b|; None where no difference is a finite number
    relative: float | None  # ‖a − b‖ ÷ the larger of ‖a‖ and ‖b‖, over finite differences
    not_finite: int  # how many of the different are infinite or NaN on one side


@dataclass(frozen=True)
class OtherKind:
    """A tensor whose shape or type is another one."""

    name: str
    first: str  # "F32 [10, 16]"
    second: str


@dataclass(frozen=True)
class OtherState:
    """Something that is no tensor. What one side does not have is None there."""

    name: str  # "samples", "versions.torch", "training.step"
    first: Any
    second: Any


@dataclass(frozen=True)
class Difference:
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    kinds: tuple[OtherKind, ...]
    numbers: tuple[OtherNumbers, ...]  # the largest difference first
    state: tuple[OtherState, ...]
    equal: int  # tensors that are the same

    @property
    def same(self) -> bool:
        return not (self.only_first or self.only_second or self.kinds or self.numbers or self.state)

    def document(self) -> dict[str, Any]:
        return {"same": self.same, **asdict(self)}


def difference(
    first: tuple[Mapping[str, Any], Mapping[str, StoredTensor]],
    second: tuple[Mapping[str, Any], Mapping[str, StoredTensor]],
    report: Report | None = None,
) -> Difference:
    """Of two checkpoints, each given as its manifest and its tensors. What is read of them is verified."""
    a, b = first[1], second[1]
    common = [name for name in a if name in b]
    kinds = tuple(OtherKind(n, _kind(a[n]), _kind(b[n])) for n in common if _kind(a[n]) != _kind(b[n]))
    alike = [name for name in common if _kind(a[name]) == _kind(b[name])]
    total, done = sum(a[name].byte_count for name in alike), 0
    numbers = []
    for name in alike:
        found = compared(name, read_tensor(a[name]), read_tensor(b[name]))
        numbers += [found] if found is not None else []
        done += a[name].byte_count
        if report is not None:
            report(done, total)
    return Difference(
        only_first=tuple(sorted(a.keys() - b.keys())),
        only_second=tuple(sorted(b.keys() - a.keys())),
        kinds=kinds,
        numbers=tuple(sorted(numbers, key=_largest_first)),
        state=tuple(_other_state(first[0], second[0])),
        equal=len(alike) - len(numbers),
    )


def compared(name: str, a: Tensor, b: Tensor) -> OtherNumbers | None:
    """In what two tensors of one shape and type differ; None where they do not."""
    different = not_finite = 0
    largest, squares, norms = -1.0, 0.0, [0.0, 0.0]
    for start in range(0, a.numel(), _AT_ONCE):
        x, y = (t.reshape(-1)[start : start + _AT_ONCE] for t in (a, b))
        wide_x, wide_y = _wide(x), _wide(y)
        same = _exact(x, wide_x).eq(_exact(y, wide_y)) | (wide_x.isnan() & wide_y.isnan())
        distance = (wide_x - wide_y).abs()[~same]
        finite = distance[distance.isfinite()]
        different += distance.numel()
        not_finite += distance.numel() - finite.numel()
        if finite.numel():
            largest = max(largest, float(finite.max()))
            squares += float(finite.square().sum())
        for side, wide in enumerate((wide_x, wide_y)):
            norms[side] += float(wide.abs().nan_to_num(0.0, 0.0, 0.0).square().sum())
    if not different:
        return None
    scale = math.sqrt(max(norms))
    relative = math.sqrt(squares) / scale if largest >= 0 and scale else None
    return OtherNumbers(name, a.numel(), different, largest if largest >= 0 else None, relative, not_finite)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _exact(numbers: Tensor, wide: Tensor) -> Tensor:
    """Numbers as they can be compared: whole ones of 64 bits as they are, since a double has not room for all."""
    if numbers.dtype.is_floating_point or numbers.is_complex():
        return wide
    return numbers.view(_SIGNED.get(numbers.dtype, numbers.dtype))


def _kind(stored: StoredTensor) -> str:
    return f"{stored.dtype} {list(stored.shape)}"


def _largest_first(found: OtherNumbers) -> tuple[bool, float, str]:
    return not found.not_finite, -(found.largest or 0.0), found.name


def _other_state(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[OtherState]:
    a, b = (
        dict(_flat({key: value for key, value in manifest.items() if key not in _NOT_STATE}))
        | dict(_flat(manifest.get("state", {})))
        for manifest in (first, second)
    )
    for name in dict.fromkeys([*a, *b]):
        x, y = a.get(name, _NOTHING), b.get(name, _NOTHING)
        if x != y and repr(x) != repr(y):  # the latter: NaN is no other state than NaN
            yield OtherState(name, a.get(name), b.get(name))


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What is in nested mappings, under dotted names. A list counts as one."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, value
