"""Workspace: memory that cuDNN and the attention kernels ask of torch's allocator while one of them runs.

No torch operator shows it, and cuDNN does not document how much it takes: these are estimates from how the kernels
work, each with what it assumes.
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
TENSOR_CORES_16_BIT, TENSOR_CORES_TF32 = (7, 0), (8, 0)  # the first GPUs with them (Volta, Ampere)

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
    if kernel == (3, 3) and same_size and groups == 1 and size == FLOAT32_BYTES and not channels_last:
        return int(size * (WINOGRAD_TILE * (inputs + outputs) + WINOGRAD_FILTER * weights))
    return sliced


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
