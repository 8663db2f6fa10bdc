"""Workspace: memory that cuDNN, attention kernels and sums ask of torch's allocator while one of them runs.

No torch operator shows it, and cuDNN does not document how much it takes: what is said of it are estimates from how the
kernels work, each with what it assumes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

# cuDNN's tensor-core convolutions work on channels-last data. What lies otherwise is copied into such an order, and the
# result back: input, filter and result once each.
RELAID_COPIES = 1.0
# The gradient of a filter sums over all positions of all samples. To fill a device that sum is cut into slices, each of
# which writes a filter in float32.
FILTER_SLICES = 8
FLOAT32_BYTES = 4
# A 3×3 convolution with stride 1 in plain float32 goes through Winograd's transform of tiles of 4×4: 36 numbers for 16
# of input and output, and 36 for 9 of the filter.
WINOGRAD_TILE = 36 / 16
WINOGRAD_FILTER = 36 / 9
# The filter's gradient of such a convolution over small images, with their border of zeros, goes through Fourier
# transforms of inputs, outputs and filters (seen on an H200: a small convolutional net at 8×8, ResNet-50 at 14×14).
FFT_TILE, COMPLEX_BYTES = 16, 8
TENSOR_CORES_16_BIT, TENSOR_CORES_TF32 = (7, 0), (8, 0)  # the first GPUs with them (Volta, Ampere)

# How torch sums over rows (ATen/native/cuda/Reduce.cuh, setReduceConfig): threads that a block has for each number that
# a thread loads at once, and by how many values each of them wants to add.
REDUCING_THREADS, WARP, LOADED_AT_ONCE = 512, 32, 4
FEWEST_VALUES, MOST_VALUES = 16, 256
# Of a GPU by its compute capability: multiprocessors (of the largest one in hardware/catalogue.yaml, or else as many as
# Hopper's), and the threads that one can hold (CUDA C++ programming guide, technical specifications).
MULTIPROCESSORS = {(7, 0): 80, (8, 0): 108, (8, 9): 142, (9, 0): 132, (10, 0): 152}
HOPPERS_MULTIPROCESSORS, MOST_THREADS = 132, 2048
FEWER_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}

FLASH_ROWS = 128  # flash attention's backward rounds sequences up to whole blocks
FLASH_WIDTHS = 32  # and widths of heads to multiples of this

Direction = Literal["forward", "input", "weight"]  # of a convolution: its result, or a gradient


def convolution_workspace_bytes(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    output_shape: Sequence[int],
    dtype: Any,  # of torch, or its name
    channels_last: bool,
    groups: int,
    direction: Direction,
    capability: tuple[int, int],
    tf32: bool = False,
) -> int:
    """Bytes that a convolution needs beside its tensors, with `torch.backends.cudnn.benchmark` off.

    `direction` is what is computed: the output, or the gradient of the input or of the weight.
    """
    name = str(dtype).removeprefix("torch.")
    size = 2 if name in ("float16", "bfloat16") else 8 if name == "float64" else FLOAT32_BYTES
    inputs, weights, outputs = (math.prod(shape) for shape in (input_shape, weight_shape, output_shape))
    if groups > 1 and weight_shape[1] == 1 and not (channels_last and size == 2):
        return 0  # depthwise: torch's own kernels
    sliced = FILTER_SLICES * weights * FLOAT32_BYTES if direction == "weight" else 0
    tensor_cores = (size == 2 and capability >= TENSOR_CORES_16_BIT) or (
        name == "float32" and tf32 and capability >= TENSOR_CORES_TF32
    )
    if tensor_cores:
        return sliced if channels_last else int(RELAID_COPIES * size * (inputs + weights + outputs)) + sliced
    kernel = tuple(weight_shape[2:])
    same_size = tuple(input_shape[2:]) == tuple(output_shape[2:])
    if channels_last:  # plain float32 is done with channels apart
        return int(RELAID_COPIES * size * (inputs + weights + outputs)) + sliced
    if kernel == (3, 3) and same_size and groups == 1 and size == FLOAT32_BYTES:
        if direction == "weight" and FFT_TILE // 2 <= max(input_shape[2:]) <= FFT_TILE - 2:
            images = input_shape[0] * (input_shape[1] + output_shape[1]) + weight_shape[0] * weight_shape[1]
            return images * FFT_TILE * (FFT_TILE // 2 + 1) * COMPLEX_BYTES
        return int(size * (WINOGRAD_TILE * (inputs + outputs) + WINOGRAD_FILTER * weights))
    return sliced


def reduction_workspace_bytes(columns: int, capability: tuple[int, int], element_bytes: int = 4) -> tuple[int, int]:
    """Bytes that torch's sum over the rows of a matrix takes, as the gradient of a bias is one; and from how many rows.

    With many rows, several blocks add up the same columns and put their sums into a buffer. Torch asks for as many
    numbers as all threads could have, so that this is about 64 KiB for each block that a GPU can run at a time,
    whatever the matrix: 132 MiB on an H200. It grows to that with the rows; up to half of it, none is said to be there.
    """
    at_once = next(n for n in (LOADED_AT_ONCE, 2, 1) if columns % n == 0)
    threads = REDUCING_THREADS // at_once
    width = min(_power_of_two(columns // at_once), WARP)
    height = threads // width
    grid = math.ceil(columns / at_once / width)
    blocks = MULTIPROCESSORS.get(capability, HOPPERS_MULTIPROCESSORS) * (
        FEWER_THREADS.get(capability, MOST_THREADS) // threads
    )
    together = math.ceil(blocks / grid)
    if together <= 1:
        return 0, 0
    values = max(MOST_VALUES, FEWEST_VALUES * together // 2)  # that each thread adds up
    return element_bytes * columns * together * width * at_once, values * height


def _power_of_two(number: int) -> int:
    """The largest that is not above the number, and not above the threads of a block."""
    return int(min(REDUCING_THREADS, 1 << (max(1, number).bit_length() - 1)))


def attention_workspace_bytes(
    kernel: Literal["flash", "efficient", "cudnn"],
    samples: int,
    heads: int,
    key_value_heads: int,
    queries: int,
    keys: int,
    width: int,
    element_bytes: int,
) -> int:
    """Bytes that the backward pass of a fused attention kernel needs beside its tensors; forward needs next to none.

    All of them hold the gradient of the queries, or what it is made of, in float32, and a sum for each row. Where heads
    share keys and values, flash attention and cuDNN make their gradients for each head before they add them up.
    """
    if kernel == "efficient":
        return FLOAT32_BYTES * samples * heads * queries * (width + 1)
    rows = math.ceil(queries / FLASH_ROWS) * FLASH_ROWS
    columns = math.ceil(width / FLASH_WIDTHS) * FLASH_WIDTHS
    needed = FLOAT32_BYTES * samples * heads * rows * (columns + 1)
    if key_value_heads != heads:
        needed += 2 * samples * heads * keys * width * element_bytes
    return needed
