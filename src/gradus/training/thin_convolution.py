"""Convolutions of a few channels, such as the first of a network for images: compiled for a GPU, kernels of our own.

cuDNN's take three to four times as long, as they fill an image's three channels up to eight
(thin_convolution_kernel.py). The gradient by the images themselves is left to it: hardly anybody wants one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from gradus.parallel.support import THIN_CHANNELS, THIN_NUMBERS
from gradus.training.graph_editing import has_channels_last, insert

aten = torch.ops.aten
DEVICES = ("cuda",)  # where code that is compiled is Triton's anyway
DTYPES = (torch.bfloat16, torch.float16)
MOST_ELEMENTS = 2**30  # of the images, so that 32 bits can count them and what is beyond their borders

_library: Any = torch.library.Library("gradus", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "thin_convolution(Tensor x, Tensor weights, int[2] stride, int[2] padding) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    "thin_convolution_weights(Tensor gradient, Tensor x, int[2] kernel, int[2] stride, int[2] padding) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def result_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, int]:
    rows, columns = (
        (length + 2 * around - window) // step + 1
        for length, window, step, around in zip(size, kernel, stride, padding, strict=True)
    )
    return rows, columns


def _convolution(x: Tensor, weights: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    from gradus.training.thin_convolution_kernel import convolution

    if not _can_be_counted(x):
        return torch.conv2d(x, weights, None, stride, padding)
    return convolution(x, weights, stride, padding)


def _of_weights(
    gradient: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    from gradus.training.thin_convolution_kernel import gradient_by_weights

    if not _can_be_counted(x):
        weights = gradient.new_empty((gradient.shape[1], x.shape[1], *kernel))  # of which only the shape counts
        rest = ([1, 1], False, [0, 0], 1, [False, True, False])
        found: Tensor = aten.convolution_backward(gradient, x, weights, None, stride, padding, *rest)[1]
        return found.contiguous(memory_format=torch.channels_last)
    return gradient_by_weights(gradient, x, kernel, stride, padding)


def _can_be_counted(x: Tensor) -> bool:
    return x.numel() <= MOST_ELEMENTS


def _convolution_without_values(x: Tensor, weights: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    size = result_size(x.shape[2:], weights.shape[2:], stride, padding)
    return x.new_empty((x.shape[0], *size, weights.shape[0])).permute(0, 3, 1, 2)


def _of_weights_without_values(gradient: Tensor, x: Tensor, kernel: Sequence[int], *rest: Any) -> Tensor:
    return gradient.new_empty((gradient.shape[1], *kernel, x.shape[1])).permute(0, 3, 1, 2)


_library.impl("thin_convolution", _convolution, "CompositeExplicitAutograd")
_library.impl("thin_convolution_weights", _of_weights, "CompositeExplicitAutograd")
torch.library.register_fake("gradus::thin_convolution", _convolution_without_values, lib=_library)
torch.library.register_fake("gradus::thin_convolution_weights", _of_weights_without_values, lib=_library)


def use_thin_convolutions(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is aten.convolution.default:
            _replace_forward(graph, node)
        elif node.target is aten.convolution_backward.default:
            _replace_backward(graph, node)


def _replace_forward(graph: fx.Graph, node: fx.Node) -> None:
    x, weights, bias, stride, padding = cast(tuple[Any, ...], node.args[:5])
    if not _is_thin(x, weights, node, node.args[3:9]):
        return
    with graph.inserting_before(node):
        ours = insert(graph, node, torch.ops.gradus.thin_convolution.default, x, weights, stride, padding)
        if bias is not None:
            of_channels = insert(graph, node, aten.reshape.default, bias, [1, -1, 1, 1])
            ours = insert(graph, node, aten.add.Tensor, ours, of_channels)
    node.replace_all_uses_with(ours)
    graph.erase_node(node)


def _replace_backward(graph: fx.Graph, node: fx.Node) -> None:
    """Where no gradient by the images is wanted. Of what it gives, each of its users takes one by its number."""
    gradient, x, weights, _, stride, padding = cast(tuple[Any, ...], node.args[:6])
    by_images, by_weights, _ = cast(Sequence[bool], node.args[10])
    if by_images or not by_weights or not _is_thin(x, weights, gradient, node.args[4:10]):
        return
    kernel = list(weights.meta["val"].shape[2:])
    for user in list(node.users):
        with graph.inserting_before(user):
            if user.args[1] == 1:
                operator = torch.ops.gradus.thin_convolution_weights.default
                ours = insert(graph, user, operator, gradient, x, kernel, stride, padding)
            else:  # by the bias; most devices have it as a sum by now
                ours = insert(graph, user, aten.sum.dim_IntList, gradient, [0, 2, 3])
        user.replace_all_uses_with(ours)
        graph.erase_node(user)
    graph.erase_node(node)


def _is_thin(x: fx.Node, weights: fx.Node, result: fx.Node, settings: Sequence[Any]) -> bool:
    """Whether it is a convolution that the kernels are for, and can do."""
    stride, padding, dilation, transposed, _, groups = settings
    if transposed or groups != 1 or any(number != 1 for number in dilation):
        return False
    of_x, of_weights = x.meta["val"], weights.meta["val"]
    if of_x.device.type not in DEVICES or of_x.dtype not in DTYPES or of_weights.dtype != of_x.dtype:
        return False
    if of_x.dim() != 4 or not all(isinstance(number, int) for number in (*stride, *padding, *of_weights.shape)):
        return False
    if len(stride) != 2 or len(padding) != 2:  # one number for both
        return False
    _, channels, height, width = of_weights.shape
    is_small = channels <= THIN_CHANNELS and channels * height * width <= THIN_NUMBERS
    return is_small and has_channels_last(x) and has_channels_last(result)
