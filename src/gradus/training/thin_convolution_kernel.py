"""Kernels for convolutions of a few channels: forward, and the gradient by the weights.

A library's kernels multiply the channels of one pixel after the other, eight of them at least: of an image's three,
more than half is zeros. Here what is multiplied is a whole window, with as many numbers as one output has weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradus.training.thin_convolution import result_size

# Of several that were tried on an H200, with windows of 7 × 7 and 3 × 3 pixels of three channels.
PART = 32  # numbers of a window that are multiplied at once
PIXELS = 128  # of the result, that a program has in hand
TILES = 24  # so many times: what a program adds up of a gradient by the weights
MOST_OUTPUTS = 64  # of a program
WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _windows(  # type: ignore[no-untyped-def]
    x,
    pixel,
    pixels,
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    PART: tl.constexpr,
):
    """Of the windows of some pixels of the result, the numbers from FIRST on: (pixels, PART)."""
    number = FIRST + tl.arange(0, PART)
    down = number // (KERNEL_W * CHANNELS)
    right = number // CHANNELS % KERNEL_W
    top = pixel // COLUMNS % ROWS * STRIDE_H - PADDING_H
    left = pixel % COLUMNS * STRIDE_W - PADDING_W
    corner = ((pixel // (ROWS * COLUMNS) * HEIGHT + top) * WIDTH + left) * CHANNELS
    within = (down * WIDTH + right) * CHANNELS + number % CHANNELS
    y, column = top[:, None] + down[None, :], left[:, None] + right[None, :]
    mask = (pixel < pixels)[:, None] & (number < KERNEL_H * KERNEL_W * CHANNELS)[None, :]
    mask &= (y >= 0) & (y < HEIGHT) & (column >= 0) & (column < WIDTH)
    return tl.load(x + corner[:, None] + within[None, :], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _convolution_of_pixels(  # type: ignore[no-untyped-def]
    x,
    weights,
    result,
    pixels,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    ALL_OUTPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Some pixels of the result, and some outputs. `weights` are (outputs, numbers of a window)."""
    NUMBERS: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((PIXELS, OUTPUTS), tl.float32)
    for part in tl.static_range(PARTS):
        windows = _windows(
            x,
            pixel,
            pixels,
            part * PART,
            CHANNELS,
            HEIGHT,
            WIDTH,
            ROWS,
            COLUMNS,
            KERNEL_H,
            KERNEL_W,
            STRIDE_H,
            STRIDE_W,
            PADDING_H,
            PADDING_W,
            PART,
        )
        number = part * PART + tl.arange(0, PART)
        mask = (number < NUMBERS)[:, None] & (output < ALL_OUTPUTS)[None, :]
        of_part = tl.load(weights + output[None, :] * NUMBERS + number[:, None], mask=mask, other=0.0)
        total = tl.dot(windows, of_part, total, input_precision="ieee")
    at = pixel.to(tl.int64)[:, None] * ALL_OUTPUTS + output[None, :]
    mask = (pixel < pixels)[:, None] & (output < ALL_OUTPUTS)[None, :]
    tl.store(result + at, total.to(result.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _convolution_of_weights(  # type: ignore[no-untyped-def]
    gradient,
    x,
    result,
    pixels,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    ALL_OUTPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PIXELS: tl.constexpr,
    TILES: tl.constexpr,
):
    """What TILES × PIXELS pixels of the result add to the gradient by the weights of some outputs."""
    NUMBERS: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    totals = ()
    for _ in tl.static_range(PARTS):
        totals += (tl.zeros((OUTPUTS, PART), tl.float32),)  # type: ignore[assignment]
    for tile in range(TILES):
        pixel = (tl.program_id(0) * TILES + tile) * PIXELS + tl.arange(0, PIXELS)
        mask = (pixel < pixels)[None, :] & (output < ALL_OUTPUTS)[:, None]
        at = pixel.to(tl.int64)[None, :] * ALL_OUTPUTS + output[:, None]
        of_outputs = tl.load(gradient + at, mask=mask, other=0.0)
        more = ()
        for part in tl.static_range(PARTS):
            windows = _windows(
                x,
                pixel,
                pixels,
                part * PART,
                CHANNELS,
                HEIGHT,
                WIDTH,
                ROWS,
                COLUMNS,
                KERNEL_H,
                KERNEL_W,
                STRIDE_H,
                STRIDE_W,
                PADDING_H,
                PADDING_W,
                PART,
            )
            more += (tl.dot(of_outputs, windows, totals[part], input_precision="ieee"),)  # type: ignore[assignment]
        totals = more
    for part in tl.static_range(PARTS):
        number = part * PART + tl.arange(0, PART)
        at = (tl.program_id(0) * ALL_OUTPUTS + output).to(tl.int64)[:, None] * NUMBERS + number[None, :]
        tl.store(result + at, totals[part], mask=(output < ALL_OUTPUTS)[:, None] & (number < NUMBERS)[None, :])


def convolution(x: Tensor, weights: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Of images with channels side by side, which the result has as well."""
    rows, columns = result_size(x.shape[2:], weights.shape[2:], stride, padding)
    result = torch.empty(
        (x.shape[0], weights.shape[0], rows, columns),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    pixels, sizes = x.shape[0] * rows * columns, _sizes(x, result, weights.shape[2:], stride, padding)
    _convolution_of_pixels[(triton.cdiv(pixels, PIXELS), triton.cdiv(weights.shape[0], sizes["OUTPUTS"]))](
        x.contiguous(memory_format=torch.channels_last),
        weights.permute(0, 2, 3, 1).contiguous(),
        result,
        pixels,
        **sizes,
        num_warps=WARPS,
    )
    return result


def gradient_by_weights(
    gradient: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Of a convolution's weights, from the gradient of its result. Nothing is added up in an order that may change."""
    images, outputs, rows, columns = gradient.shape
    pixels, sizes = images * rows * columns, _sizes(x, gradient, kernel, stride, padding)
    programs = triton.cdiv(pixels, TILES * PIXELS)
    parts = torch.empty((programs, outputs, *kernel, x.shape[1]), dtype=torch.float32, device=x.device)
    _convolution_of_weights[(programs, triton.cdiv(outputs, sizes["OUTPUTS"]))](
        gradient.contiguous(memory_format=torch.channels_last),
        x.contiguous(memory_format=torch.channels_last),
        parts,
        pixels,
        **sizes,
        TILES=TILES,
        num_warps=WARPS,
    )
    return parts.sum(0).to(gradient.dtype).permute(0, 3, 1, 2)


def _sizes(
    x: Tensor, result: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> dict[str, int]:
    """What both kernels are compiled for."""
    _, channels, height, width = x.shape
    _, outputs, rows, columns = result.shape
    return {
        "CHANNELS": channels,
        "HEIGHT": height,
        "WIDTH": width,
        "ROWS": rows,
        "COLUMNS": columns,
        "KERNEL_H": kernel[0],
        "KERNEL_W": kernel[1],
        "STRIDE_H": stride[0],
        "STRIDE_W": stride[1],
        "PADDING_H": padding[0],
        "PADDING_W": padding[1],
        "ALL_OUTPUTS": outputs,
        "OUTPUTS": min(MOST_OUTPUTS, max(16, triton.next_power_of_2(outputs))),  # 16: the least that is multiplied
        "PARTS": triton.cdiv(channels * kernel[0] * kernel[1], PART),
        "PART": PART,
        "PIXELS": PIXELS,
    }
