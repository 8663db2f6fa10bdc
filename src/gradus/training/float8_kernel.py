"""Kernels that bring a matrix into 8 bits with one scale: as it is, transposed, or both, in two passes over it.

A compiler fuses the search for the largest number, the conversion and the transposed copy each with what made the
matrix, so that a GELU and its derivative are computed three times over, and writes columns a byte at a time. Here the
matrix is read twice, whatever it is made of, and both copies are written in whole lines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PARTS = 1024  # of the search: each leaves one number, and everybody who scales reads all of them
BLOCK, WARPS = 4096, 8  # numbers that a part has in hand
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
    matrix: Tensor, scale: Tensor | None, dtype: torch.dtype, least: float, *, across: bool, down: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The matrix in 8 bits as it is (`across`) and transposed (`down`), each empty if not wanted, and its scale.

    Without a scale that is known, it is the largest number, or `least`, over the format's largest.
    """
    matrix = matrix.contiguous()
    rows, columns = matrix.shape
    device, size = matrix.device, matrix.numel()
    values = torch.empty((rows, columns) if across else (0, 0), dtype=dtype, device=device)
    turned = torch.empty((columns, rows) if down else (0, 0), dtype=dtype, device=device)
    parts, known = min(MOST_PARTS, triton.cdiv(size, BLOCK)), scale is not None
    found = torch.empty(1 if known else parts, dtype=torch.float32, device=device)
    if scale is None:
        scale = torch.empty((1, 1), dtype=torch.float32, device=device)
        _largest_of_parts[(parts,)](matrix, found, size, BLOCK=BLOCK, num_warps=WARPS)
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
            parts,
            LARGEST=torch.finfo(dtype).max,
            LEAST=least,
            FORMAT=_FORMATS[dtype],
            KNOWN=known,
            ACROSS=in_rows,
            DOWN=in_columns,
            PARTS=triton.next_power_of_2(parts),
            TILE=TILE,
            num_warps=TILE_WARPS,
        )
    return values, turned, scale
