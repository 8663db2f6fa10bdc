"""Workspaces: what cuDNN and attention kernels take beside their tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradus.planner.profile.workspace import (
    attention_workspace_bytes,
    convolution_workspace_bytes,
    reduction_workspace_bytes,
)

INPUT, WEIGHT, OUTPUT = (8, 64, 56, 56), (128, 64, 3, 3), (8, 128, 28, 28)
ELEMENTS = 8 * 64 * 56 * 56 + 128 * 64 * 9 + 8 * 128 * 28 * 28


def workspace(dtype: str = "bfloat16", channels_last: bool = False, direction: Any = "forward", **more: Any) -> int:
    return convolution_workspace_bytes(
        INPUT, WEIGHT, OUTPUT, dtype, channels_last, 1, direction, more.pop("capability", (9, 0)), **more
    )


def test_tensor_cores_want_copies_with_channels_last() -> None:
    assert workspace() == 2 * ELEMENTS
    assert workspace(channels_last=True) == 0
    assert workspace("float32", tf32=True) == 4 * ELEMENTS
    assert workspace("float32", tf32=True, capability=(7, 0)) == 0
    assert workspace("float32") == 0


def test_the_gradient_of_a_filter_is_summed_in_slices_of_float32() -> None:
    filter_bytes = 4 * 128 * 64 * 9
    extra = workspace(direction="weight") - workspace()
    assert extra == workspace(channels_last=True, direction="weight") > 0
    assert extra % filter_bytes == 0


def test_depthwise_convolutions_need_nothing() -> None:
    shape = (8, 64, 56, 56)
    for direction in ("forward", "input", "weight"):
        assert convolution_workspace_bytes(shape, (64, 1, 7, 7), shape, "bfloat16", False, 64, direction, (9, 0)) == 0


@pytest.mark.parametrize("direction", ["forward", "input", "weight"])
def test_a_torch_dtype_is_as_good_as_its_name(direction: Any) -> None:
    for name in ("float16", "float32"):
        assert workspace(getattr(torch, name), direction=direction) == workspace(name, direction=direction)


def test_attention_adds_up_the_gradient_of_queries_in_float32() -> None:
    rows, whole = 2 * 8 * 128, (2, 8, 8, 128, 128, 64, 2)
    for kernel in ("flash", "cudnn", "efficient"):
        assert attention_workspace_bytes(kernel, *whole) == 4 * rows * (64 + 1)
    # Lengths and widths are rounded up; shared keys and values are made for each head first.
    assert attention_workspace_bytes("flash", 2, 8, 8, 100, 100, 60, 2) == 4 * rows * (64 + 1)
    shared = attention_workspace_bytes("flash", 2, 8, 2, 128, 128, 64, 2)
    assert shared - attention_workspace_bytes("flash", *whole) == 2 * 2 * rows * 64


@pytest.mark.parametrize("columns", [768, 3072, 8192])
def test_a_sum_over_many_rows_takes_what_all_blocks_of_the_gpu_could_write(columns: int) -> None:
    """On an H200, backward of Linear layers of these widths peaked 132 MiB above its tensors."""
    size, from_rows = reduction_workspace_bytes(columns, (9, 0))
    assert size == 132 * 2**20
    assert 1024 <= from_rows <= 16_384
    assert reduction_workspace_bytes(columns, (8, 0))[0] < size  # a GPU with fewer multiprocessors
    assert reduction_workspace_bytes(50_257 * 8, (9, 0)) == (0, 0), "enough columns for all blocks"


def test_small_images_in_float32_go_through_fourier_transforms() -> None:
    def gradient(side: int) -> int:
        shape = (128, 128, side, side)
        return convolution_workspace_bytes(
            shape, (256, 128, 3, 3), (128, 256, side, side), "float32", False, 1, "weight", (9, 0)
        )

    assert gradient(8) == gradient(14) == 16 * 9 * 8 * (128 * 128 + 128 * 256 + 128 * 256)
    assert gradient(7) < gradient(8)


def test_plain_float32_wants_channels_apart() -> None:
    assert workspace("float32", channels_last=True) == 4 * ELEMENTS
