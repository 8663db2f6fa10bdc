"""A kernel for the loss of some tokens: cross-entropy, and its gradient by the logits in their place.

A compiler makes two passes over logits for the loss and two for the gradient, which it writes beside them. Here a
program has one row at a time, which is still in the second-level cache when it is read again, and the gradient takes
the logits' memory. A chunk of logits is read from memory once and written once.

Numbers are reduced inside a thread as long as a row lasts: threads wait for each other once a row and not once a block.
Powers are of 2, which the device computes by itself, with one multiplication and addition before each.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradus.models.output import IGNORED

WARPS = 16
LOAD_BYTES = 16  # the most that a thread loads at once
BLOCK_BYTES = 16384  # of a row that a program has in hand: two such loads of each thread are under way
REGISTERS = 64  # of a thread: with more, a multiprocessor of 65,536 has room for one program and waits where that waits
MOST_PROGRAMS = 2  # which is the room that there is then
SCALED_BLOCK = 2048
# For rows that are to be read again, of the second-level cache; the rest is for what is written meanwhile.
SHARE_OF_CACHE = 2 / 3

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# Below any logit. Of threads that see none, infinity less infinity would be no number.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _added(x, largest, total):  # type: ignore[no-untyped-def]
    """The largest logit and the sum of powers, of each thread's share of the row, with those of another block."""
    larger = tl.maximum(largest, tl.max(x, 1))
    powers = tl.exp2(x * _LOG2_E - (larger * _LOG2_E)[:, None])
    return larger, total * tl.exp2((largest - larger) * _LOG2_E) + tl.sum(powers, 1)


@triton.jit
def _gradient(x, at, target, normaliser):  # type: ignore[no-untyped-def]
    probability = tl.exp2(x * _LOG2_E - normaliser)
    return tl.where(at == target, probability - 1.0, probability)


@triton.jit  # type: ignore[untyped-decorator]
def _loss_of_rows(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    rows,
    stride,
    IGNORED: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Some rows, one after the other. Of WIDTH columns, those from COLUMNS on are padding, and get no gradient.

    A block is (threads, TOGETHER): what a thread loads at once is what it reduces by itself. Only the last one has a
    mask, since questions for each number cost about as much as the work on it.
    """
    block = tl.arange(0, BLOCK // TOGETHER)[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    WHOLE: tl.constexpr = COLUMNS // BLOCK * BLOCK
    last = WHOLE + block
    row = tl.program_id(0)
    while row < rows:
        target = tl.load(targets + row).to(tl.int32)
        here = logits + row.to(tl.int64) * stride
        if target == IGNORED:
            tl.store(losses + row, 0.0)
            for start in range(0, WIDTH, BLOCK):
                at = start + block
                tl.store(here + at, tl.zeros_like(at).to(logits.dtype.element_ty), mask=at < WIDTH)
        else:
            # Read before threads wait for each other: after that, some may have put the gradient in its place. A target
            # that is no column makes a loss that is no number, which is noticed.
            wanted = tl.load(here + target, mask=(target >= 0) & (target < COLUMNS), other=float("nan")).to(tl.float32)
            largest = tl.full((BLOCK // TOGETHER,), _LOWEST, tl.float32)
            total = tl.zeros((BLOCK // TOGETHER,), tl.float32)
            for start in range(0, WHOLE, BLOCK):
                x = tl.load(here + (start + block), eviction_policy="evict_last").to(tl.float32)
                largest, total = _added(x, largest, total)
            if WHOLE < WIDTH:
                x = tl.load(here + last, mask=last < WIDTH, other=0.0, eviction_policy="evict_last").to(tl.float32)
                largest, total = _added(tl.where(last < COLUMNS, x, float("-inf")), largest, total)
            top = tl.max(largest, 0)
            normaliser = top * _LOG2_E + tl.log2(tl.sum(total * tl.exp2((largest - top) * _LOG2_E), 0))
            tl.store(losses + row, normaliser * _LN_2 - wanted)
            for start in range(0, WHOLE, BLOCK):
                at = start + block
                x = tl.load(here + at, eviction_policy="evict_first").to(tl.float32)
                gradient = _gradient(x, at, target, normaliser).to(logits.dtype.element_ty)
                tl.store(here + at, gradient, eviction_policy="evict_first")
            if WHOLE < WIDTH:
                x = tl.load(here + last, mask=last < WIDTH, other=0.0, eviction_policy="evict_first").to(tl.float32)
                gradient = _gradient(tl.where(last < COLUMNS, x, float("-inf")), last, target, normaliser)
                gradient = gradient.to(logits.dtype.element_ty)
                tl.store(here + last, gradient, mask=last < WIDTH, eviction_policy="evict_first")
        row += tl.num_programs(0)


@triton.jit  # type: ignore[untyped-decorator]
def _scale(numbers, factor, result, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(numbers + at, mask=at < size).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(result + at, scaled.to(result.dtype.element_ty), mask=at < size)


def loss_and_gradient(logits: Tensor, targets: Tensor, columns: int) -> Tensor:
    """The loss of each row, in fp32; `logits` become its gradient, and 0 from column `columns` on."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    together = LOAD_BYTES // logits.element_size()
    block = max(together, min(BLOCK_BYTES // logits.element_size(), triton.next_power_of_2(width)))
    assert width - columns // block * block <= block, f"{width} columns for {columns}: padding goes over two blocks"
    _loss_of_rows[(min(rows, _programs(logits.device, width * logits.element_size())),)](
        logits,
        targets.contiguous(),
        losses,
        rows,
        logits.stride(0),
        IGNORED=IGNORED,
        COLUMNS=columns,
        WIDTH=width,
        BLOCK=block,
        TOGETHER=together,
        num_warps=WARPS,
        **({} if torch.version.hip else {"maxnreg": REGISTERS}),
    )
    return losses


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor times one number, rounded once to another format. torch's kernel takes three times as long."""
    tensor = tensor.contiguous()
    result = torch.empty_like(tensor, dtype=dtype)
    _scale[(triton.cdiv(tensor.numel(), SCALED_BLOCK),)](tensor, factor, result, tensor.numel(), BLOCK=SCALED_BLOCK)
    return result


@cache
def _programs(device: torch.device, row_bytes: int) -> int:
    """So many that their rows stay in the second-level cache."""
    if device.type != "cuda":  # interpreted
        return 2
    facts = torch.cuda.get_device_properties(device)
    processors: int = facts.multi_processor_count
    fitting = SHARE_OF_CACHE * facts.L2_cache_size / (row_bytes * processors)
    return processors * max(1, min(MOST_PROGRAMS, int(fitting)))
