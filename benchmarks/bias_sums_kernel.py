"""Kernels that write a matrix and sum its columns on the way: what a bias needs for its gradient.

A program has some columns of some rows, and adds up what it writes. The sums of all rows are a second step, over as
many rows as there are programs below each other, in an order that is always the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from bias_sums import MOST_PARTS, ROWS
from torch import Tensor

from gradus.training.cheap_functions import ERFC_EXPONENT

WARPS = 4
COLUMNS = 256  # of a program: half a kilobyte of each row
ROWS_AT_ONCE = 8  # two loads of 16 bytes of each thread

_E1, _E2, _E3, _E4, _E5, _E6, _E7, _E8 = (tl.constexpr(coefficient) for coefficient in ERFC_EXPONENT)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NORMAL = tl.constexpr(0.3989422804014327)  # the density of the normal distribution at 0
_TANH_FACTOR = tl.constexpr(0.7978845608028654)  # the square root of 2 / pi
_TANH_CUBE = tl.constexpr(0.044715)


@triton.jit
def _erf(x):  # type: ignore[no-untyped-def]
    """As in cheap_functions.py."""
    size = tl.abs(x)
    exponent = _E6 + (_E7 + _E8 * size) * size
    exponent = _E3 + (_E4 + (_E5 + exponent * size) * size) * size
    exponent = (_E1 + (_E2 + exponent * size) * size) * size
    rest = 1.0 - tl.exp2(exponent)
    return tl.where(x < 0, -rest, rest)


@triton.jit
def _gelu(x, BY_TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The share of x that is let through, and the slope."""
    if BY_TANH:
        square = x * x
        inner = _TANH_FACTOR * x * (1.0 + _TANH_CUBE * square)
        share = 1.0 / (1.0 + tl.exp2(inner * (-2.0 * _LOG2_E)))  # half of 1 + tanh(inner)
        steepness = _TANH_FACTOR * (1.0 + 3.0 * _TANH_CUBE * square)
        return share, share + 2.0 * x * share * (1.0 - share) * steepness
    share = 0.5 * (1.0 + _erf(x * _SQRT_HALF))
    return share, share + x * _NORMAL * tl.exp2(x * x * (-0.5 * _LOG2_E))


@triton.jit  # type: ignore[untyped-decorator]
def _through_gelu(  # type: ignore[no-untyped-def]
    gradient,
    x,
    result,
    sums,
    again,
    height,
    WIDTH: tl.constexpr,
    BY_TANH: tl.constexpr,
    AGAIN: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """GELU's backward of (height, WIDTH) numbers; with AGAIN, also what GELU made of them."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    total = tl.zeros((ROWS_AT_ONCE, COLUMNS), tl.float32)
    for start in range(0, ROWS, ROWS_AT_ONCE):
        row = tl.program_id(1) * ROWS + start + tl.arange(0, ROWS_AT_ONCE)
        at = row[:, None].to(tl.int64) * WIDTH + column[None, :]
        mask = (row < height)[:, None] & is_column[None, :]
        number = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        share, slope = _gelu(number, BY_TANH)
        found = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32) * slope
        tl.store(result + at, found.to(result.dtype.element_ty), mask=mask)
        if AGAIN:
            tl.store(again + at, (number * share).to(again.dtype.element_ty), mask=mask)
        total += found
    tl.store(sums + tl.program_id(1).to(tl.int64) * WIDTH + column, tl.sum(total, 0), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _joined(  # type: ignore[no-untyped-def]
    first,
    second,
    third,
    result,
    sums,
    height,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows of WIDTH numbers, which are so many of the first, of the second and of the third, and so on in turn."""
    TOGETHER: tl.constexpr = FIRST + SECOND + THIRD
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    turn, within = column // TOGETHER, column % TOGETHER
    is_first = is_column & (within < FIRST)
    is_second = is_column & (within >= FIRST) & (within < FIRST + SECOND)
    is_third = is_column & (within >= FIRST + SECOND)
    TURNS: tl.constexpr = WIDTH // TOGETHER
    total = tl.zeros((ROWS_AT_ONCE, COLUMNS), tl.float32)
    for start in range(0, ROWS, ROWS_AT_ONCE):
        row = tl.program_id(1) * ROWS + start + tl.arange(0, ROWS_AT_ONCE)
        turns = row[:, None].to(tl.int64) * TURNS + turn[None, :]
        is_row = (row < height)[:, None]
        # Each number is in one of them, and what is not read is 0.
        at = turns * FIRST + within[None, :]
        number = tl.load(first + at, mask=is_row & is_first[None, :], other=0.0)
        at = turns * SECOND + (within - FIRST)[None, :]
        number += tl.load(second + at, mask=is_row & is_second[None, :], other=0.0)
        if THIRD:
            at = turns * THIRD + (within - FIRST - SECOND)[None, :]
            number += tl.load(third + at, mask=is_row & is_third[None, :], other=0.0)
        at = row[:, None].to(tl.int64) * WIDTH + column[None, :]
        tl.store(result + at, number, mask=is_row & is_column[None, :])
        total += number.to(tl.float32)
    tl.store(sums + tl.program_id(1).to(tl.int64) * WIDTH + column, tl.sum(total, 0), mask=is_column)


def rows_of_sums(height: int) -> int:
    return triton.cdiv(height, ROWS)  # type: ignore[no-any-return]


def gelu_backward(gradient: Tensor, x: Tensor, by_tanh: bool, again: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradient by x, of which the last dimension is columns; sums of columns of some rows each, in fp32; GELU of x
    once more, if that is asked for."""
    gradient, x = gradient.contiguous(), x.contiguous()
    width = x.shape[-1]
    height = x.numel() // width
    result, once_more = torch.empty_like(x), torch.empty_like(x) if again else None
    sums = torch.empty((rows_of_sums(height), width), dtype=torch.float32, device=x.device)
    _through_gelu[(triton.cdiv(width, COLUMNS), len(sums))](
        gradient,
        x,
        result,
        sums,
        once_more if once_more is not None else result,
        height,
        WIDTH=width,
        BY_TANH=by_tanh,
        AGAIN=again,
        ROWS=ROWS,
        ROWS_AT_ONCE=ROWS_AT_ONCE,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return result, sums, once_more


def joined(parts: Sequence[Tensor], dim: int, first_column: int) -> tuple[Tensor, Tensor]:
    """The parts as torch.cat joins them, and sums of columns of some rows each, in fp32: dimensions from `first_column`
    on are columns. `dim` is one of them."""
    assert 2 <= len(parts) <= MOST_PARTS
    assert dim >= first_column
    parts = [part.contiguous() for part in parts]
    inner = parts[0].shape[dim + 1 :].numel()
    widths = [part.shape[dim] * inner for part in parts]
    height = parts[0].shape[:first_column].numel()
    width = parts[0].shape[first_column:dim].numel() * sum(widths)
    size = [*parts[0].shape[:dim], sum(part.shape[dim] for part in parts), *parts[0].shape[dim + 1 :]]
    result = parts[0].new_empty(size)
    sums = torch.empty((rows_of_sums(height), width), dtype=torch.float32, device=result.device)
    given = [*parts, result][:MOST_PARTS]  # of two parts, the third has no width
    _joined[(triton.cdiv(width, COLUMNS), len(sums))](
        *given,
        result,
        sums,
        height,
        FIRST=widths[0],
        SECOND=widths[1],
        THIRD=sum(widths[2:]),
        WIDTH=width,
        ROWS=ROWS,
        ROWS_AT_ONCE=ROWS_AT_ONCE,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return result, sums
