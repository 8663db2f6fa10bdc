"""A kernel for the backward of max pooling: pixels gather the gradients of the windows in which they were the largest.

What it costs is arithmetic: which windows a pixel is in, and what its position is in each. So a thread has stride ×
stride pixels, whose positions in windows are the same everywhere and known when the kernel is compiled, and as many
channels, side by side in memory, as it loads at once. It loads each window that has any of these pixels once, and what
is left for a number and a window that has it is to compare a byte, to select and to add. Nothing is added to memory, so
that results do not depend on an order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
THREADS = 32 * WARPS
MOST_CHANNELS = 256  # of a program, so that it has neighbours, which share windows
LOAD_BYTES = 16  # the most that a thread loads at once


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_of_tiles(  # type: ignore[no-untyped-def]
    gradient,
    offsets,
    result,
    tiles,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    ALL_CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Some tiles of images of HEIGHT × WIDTH, and some channels. There are ROWS × COLUMNS windows.

    A tile is what is in a window and in none that begins after it, further down or right: of the window at (row,
    column), the first STRIDE_H × STRIDE_W pixels. At the borders, some of these are padding, or not in any window.
    """
    FIRST_ROW: tl.constexpr = PADDING_H // STRIDE_H
    FIRST_COLUMN: tl.constexpr = PADDING_W // STRIDE_W
    # Windows before the tile's own which reach into it, with their own.
    UPWARDS: tl.constexpr = (KERNEL_H + STRIDE_H - 1) // STRIDE_H
    LEFTWARDS: tl.constexpr = (KERNEL_W + STRIDE_W - 1) // STRIDE_W

    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    # Bytes could be loaded more at once than numbers, and would then have to change threads before they are compared.
    channel = (tl.program_id(1) * CHANNELS + tl.max_contiguous(tl.arange(0, CHANNELS), TOGETHER))[None, :]
    is_channel = channel < ALL_CHANNELS
    image = tile // (TILE_ROWS * TILE_COLUMNS)
    row = tile // TILE_COLUMNS % TILE_ROWS + FIRST_ROW
    column = tile % TILE_COLUMNS + FIRST_COLUMN
    own = ((image * ROWS + row) * COLUMNS + column).to(tl.int64) * ALL_CHANNELS

    largest = ()
    parts = ()
    for up in tl.static_range(UPWARDS):
        for left in tl.static_range(LEFTWARDS):
            at = (own - (up * COLUMNS + left) * ALL_CHANNELS)[:, None] + channel
            is_row = (tile < tiles) & (row >= up) & (row < ROWS + up)
            mask = (is_row & (column >= left) & (column < COLUMNS + left))[:, None] & is_channel
            largest += (tl.load(offsets + at, mask=mask, other=-1),)  # type: ignore[assignment]
            parts += (tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32),)  # type: ignore[assignment]

    for down in tl.static_range(STRIDE_H):
        y = row * STRIDE_H + (down - PADDING_H)
        for right in tl.static_range(STRIDE_W):
            x = column * STRIDE_W + (right - PADDING_W)
            total = tl.zeros((TILES, CHANNELS), tl.float32)
            for up in tl.static_range(UPWARDS):
                for left in tl.static_range(LEFTWARDS):
                    # Not by names for these numbers: what has one is a tensor to Triton, which cannot index tuples.
                    if (down + up * STRIDE_H < KERNEL_H) and (right + left * STRIDE_W < KERNEL_W):
                        is_largest = largest[up * LEFTWARDS + left] == (
                            (down + up * STRIDE_H) * KERNEL_W + right + left * STRIDE_W
                        )
                        total += tl.where(is_largest, parts[up * LEFTWARDS + left], 0.0)
            at = (((image * HEIGHT + y) * WIDTH + x).to(tl.int64) * ALL_CHANNELS)[:, None] + channel
            is_pixel = (tile < tiles) & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
            tl.store(result + at, total.to(result.dtype.element_ty), mask=is_pixel[:, None] & is_channel)


def max_pool_backward(
    gradient: Tensor,
    offsets: Tensor,
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """The gradient by what was pooled, (images, channels, *input_size), with channels side by side.

    `offsets` are where in each window its largest number was: row · columns of the window + column.
    """
    images, channels, rows, columns = gradient.shape
    height, width = input_size
    assert images * height * width < 2**31, f"{images} images of {height} × {width}: too many pixels for 32 bits"
    result = torch.empty(
        (images, channels, height, width),
        dtype=gradient.dtype,
        device=gradient.device,
        memory_format=torch.channels_last,
    )
    tile_rows, tile_columns = (
        (size - 1 + before) // step - before // step + 1
        for size, step, before in zip(input_size, stride, padding, strict=True)
    )
    tiles = images * tile_rows * tile_columns
    together = LOAD_BYTES // gradient.element_size()
    channels_at_once = min(MOST_CHANNELS, triton.next_power_of_2(channels))
    tiles_at_once = THREADS * together // channels_at_once
    _gradient_of_tiles[(triton.cdiv(tiles, tiles_at_once), triton.cdiv(channels, channels_at_once))](
        gradient.contiguous(memory_format=torch.channels_last),
        offsets.contiguous(memory_format=torch.channels_last),
        result,
        tiles,
        HEIGHT=height,
        WIDTH=width,
        ROWS=rows,
        COLUMNS=columns,
        TILE_ROWS=tile_rows,
        TILE_COLUMNS=tile_columns,
        KERNEL_H=kernel[0],
        KERNEL_W=kernel[1],
        STRIDE_H=stride[0],
        STRIDE_W=stride[1],
        PADDING_H=padding[0],
        PADDING_W=padding[1],
        ALL_CHANNELS=channels,
        TILES=tiles_at_once,
        CHANNELS=channels_at_once,
        TOGETHER=together,
        num_warps=WARPS,
    )
    return result
