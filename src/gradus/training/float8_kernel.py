"""Kernels that bring a matrix into 8 bits with one scale: as it is, transposed, or both, in two passes over it.

A compiler fuses the search for the largest number, the conversion and the transposed copy each with what made the
matrix, so that a GELU and its derivative are computed three times over, and writes columns a byte at a time. Here the
matrix is read twice, whatever it is made of, and both copies are written in whole lines. The sum of a gradient's rows,
which is the gradient of a bias, is found in the search: a compiler would make the matrix once more for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of the search: each leaves one number, and everybody who scales reads all of them. (Where rows are summed, there are
# more of a matrix with more than a quarter of a million columns.)
MOST_PARTS = 1024
BLOCK, WARPS = 4096, 8  # numbers that a part has in hand
# The same where rows are summed: lines of 512 bytes, and so small that all parts are on a GPU at the same time.
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 8, 256, 4
# Rows of 128 bytes in both directions, which is a line of the cache.
TILE, TILE_WARPS = 128, 8


@triton.jit  # type: ignore[untyped-decorator]
def _largest_of_parts(matrix, found, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.program_id(0)
    largest = tl.zeros((BLOCK,), tl.float32)
    start = part.to(tl.int64) * BLOCK
    while start < size:
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(matrix + at, mask=at < size, other=0.0).to(tl.float32)))
        start += tl.num_programs(0).to(tl.int64) * BLOCK
    tl.store(found + part, tl.max(largest, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _largest_and_sums_of_parts(  # type: ignore[no-untyped-def]
    matrix, found, sums, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The same of some columns and every so many rows, and what these rows sum up to."""
    group = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    summed = tl.zeros((ROWS, COLUMNS), tl.float32)
    start = group * ROWS
    while start < rows:
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        numbers = tl.load(matrix + at, mask=(row < rows)[:, None] & there[None, :], other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(numbers))
        summed += numbers
        start += tl.num_programs(1) * ROWS
    tl.store(found + group * tl.num_programs(0) + tl.program_id(0), tl.max(tl.max(largest, 1), 0))
    tl.store(sums + group.to(tl.int64) * columns + column, tl.sum(summed, 0), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _convert(  # type: ignore[no-untyped-def]
    matrix,
    found,
    scale,
    across,
    down,
    rows,
    columns,
    parts,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    FORMAT: tl.constexpr,
    KNOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    DOWN: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A square of the matrix. What is not a number stays none, and what is infinite becomes such: the instruction that
    converts keeps the one, and times the reciprocal of an infinite scale is the other."""
    if KNOWN:
        factor = tl.load(scale)
    else:
        numbers = tl.arange(0, PARTS)
        largest = tl.maximum(tl.max(tl.load(found + numbers, mask=numbers < parts, other=0.0), 0), LEAST)
        factor = tl.div_rn(largest, LARGEST)  # the usual division is off by a digit now and then
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale, factor)
    inverse = tl.div_rn(1.0, factor)
    # Neighbours in the first direction of the grid are neighbours in a row, and run at the same time.
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    here = row.to(tl.int64)[:, None] * columns + column[None, :]
    values = (tl.load(matrix + here, mask=inside, other=0.0).to(tl.float32) * inverse).to(FORMAT)
    if ACROSS:
        tl.store(across + here, values, mask=inside)
    if DOWN:
        there = column.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(down + there, tl.trans(values), mask=(column < columns)[:, None] & (row < rows)[None, :])


_FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def to_float8(
    matrix: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    least: float,
    *,
    across: bool,
    down: bool,
    summed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The matrix in 8 bits as it is (`across`) and transposed (`down`), its scale, and the sum of its rows (`summed`).

    What is not wanted is empty. Without a scale that is known, it is the largest number, or `least`, over the format's
    largest. Only where that is searched for are rows summed.
    """
    assert scale is None or not summed
    matrix = matrix.contiguous()
    rows, columns = matrix.shape
    device = matrix.device
    values = torch.empty((rows, columns) if across else (0, 0), dtype=dtype, device=device)
    turned = torch.empty((columns, rows) if down else (0, 0), dtype=dtype, device=device)
    known = scale is not None
    if scale is None:
        found, sums = _searched(matrix, summed)
        scale = torch.empty((1, 1), dtype=torch.float32, device=device)
    else:
        found, sums = scale, scale.new_empty(0)  # nothing was searched for
    directions = [(across, down)]
    if across and down and matrix.dtype.itemsize > 2:
        # Of a tile that is converted from 32 bits and stored in both directions, ptxas 12 loses columns
        # (github.com/triton-lang/triton/issues/11111), also if it is transposed first; of 16 bits it does not.
        directions = [(True, False), (False, True)]
    for in_rows, in_columns in directions:
        _convert[(triton.cdiv(columns, TILE), triton.cdiv(rows, TILE))](
            matrix,
            found,
            scale,
            values,
            turned,
            rows,
            columns,
            found.numel(),
            LARGEST=torch.finfo(dtype).max,
            LEAST=least,
            FORMAT=_FORMATS[dtype],
            KNOWN=known,
            ACROSS=in_rows,
            DOWN=in_columns,
            PARTS=triton.next_power_of_2(found.numel()),
            TILE=TILE,
            num_warps=TILE_WARPS,
        )
    return values, turned, scale, sums


def _searched(matrix: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
    """The largest numbers of its parts, and the sum of its rows, in float32 (or nothing)."""
    rows, columns = matrix.shape
    if not summed:
        parts = min(MOST_PARTS, triton.cdiv(matrix.numel(), BLOCK))
        found = torch.empty(parts, dtype=torch.float32, device=matrix.device)
        _largest_of_parts[(parts,)](matrix, found, matrix.numel(), BLOCK=BLOCK, num_warps=WARPS)
        return found, found.new_empty(0)
    blocks = triton.cdiv(columns, SUM_COLUMNS)
    groups = max(1, min(MOST_PARTS // blocks, triton.cdiv(rows, SUM_ROWS)))
    found = torch.empty(groups * blocks, dtype=torch.float32, device=matrix.device)
    sums = found.new_empty((groups, columns))
    _largest_and_sums_of_parts[(blocks, groups)](
        matrix, found, sums, rows, columns, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=SUM_WARPS
    )
    return found, sums.sum(0)
