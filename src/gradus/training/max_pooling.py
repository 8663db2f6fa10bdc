"""Max pooling: in compiled code on a GPU, its backward is a kernel of our own (max_pool_kernel.py).

What torch's compiler makes of it takes ten times as long as it takes to write the gradient. What it keeps for backward
is right, though: where in its window each largest number was, in a byte, and nothing of what was pooled but its size.
So only backward is replaced, where it begins with these bytes. Some versions of torch have it as one operator in the
graph, others as a sum at indices and what is around that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from gradus.training.graph_editing import has_channels_last

aten, prims = torch.ops.aten, torch.ops.prims
DEVICES = ("cuda",)  # where code that is compiled is Triton's anyway
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHANNELS_MULTIPLE = 8  # so that in 16 bits each pixel begins where 16 bytes can be read at once
# Private to torch, so that it is known by its name: where there is none, nothing is found.
OFFSETS_TO_INDICES = "prims._low_memory_max_pool_offsets_to_indices.default"
OTHER_VIEWS = (aten.clone.default, aten.reshape.default, aten.view.default, aten._unsafe_view.default)

_library: Any = torch.library.Library("gradus", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "max_pool_backward(Tensor gradient, Tensor offsets, int[2] input_size, int[2] kernel, int[2] stride,"
    " int[2] padding) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _max_pool_backward(gradient: Tensor, offsets: Tensor, *window: Any) -> Tensor:
    from gradus.training.max_pool_kernel import max_pool_backward

    return max_pool_backward(gradient, offsets, *window)


def _without_values(gradient: Tensor, offsets: Tensor, input_size: list[int], *window: Any) -> Tensor:
    like: dict[str, Any] = {"dtype": gradient.dtype, "device": gradient.device}
    return torch.empty((*gradient.shape[:2], *input_size), memory_format=torch.channels_last, **like)


_library.impl("max_pool_backward", _max_pool_backward, "CompositeExplicitAutograd")
torch.library.register_fake("gradus::max_pool_backward", _without_values, lib=_library)


@dataclass(frozen=True)
class Backward:
    """The backward of a max pooling, as it is found in a graph."""

    gradient: fx.Node
    offsets: fx.Node
    result: fx.Node
    window: tuple[list[int], ...]  # the size of what was pooled, then kernel, stride and padding


def use_max_pool_kernel(graph: fx.Graph) -> None:
    found = [one for node in graph.nodes if (one := _backward(node)) is not None]
    for one in found:
        with graph.inserting_before(one.result):
            ours = graph.call_function(
                torch.ops.gradus.max_pool_backward.default, (one.gradient, one.offsets, *one.window)
            )
        ours.meta = dict(one.result.meta)
        one.result.replace_all_uses_with(ours)
    if found:
        graph.eliminate_dead_code()


def _backward(indices: fx.Node) -> Backward | None:
    """Of the pooling whose indices these are, if they are any, and the kernel can do it."""
    if indices.op != "call_function" or str(indices.target) != OFFSETS_TO_INDICES or len(indices.args) != 6:
        return None
    offsets, kernel, input_size, stride, padding, dilation = cast(tuple[Any, ...], indices.args)
    window = (input_size, kernel, stride, padding)
    are_known = all(isinstance(number, int) for numbers in (*window, dilation) for number in numbers)
    if not are_known or len(kernel) != 2 or any(number != 1 for number in dilation):
        return None
    if any(step > size for step, size in zip(stride, kernel, strict=True)):  # the kernel is as long as its tiles
        return None
    ends = _one_operator(indices) or _sum_at_indices(indices)
    if ends is None:
        return None
    output_size = list(offsets.meta["val"].shape[2:])
    gradient = next((node for node in _back(ends[0]) if _has_channels_last(node, output_size)), None)
    result = next((node for node in _on(ends[1]) if _has_channels_last(node, input_size)), None)
    if gradient is None or result is None or not _has_channels_last(offsets, output_size):
        return None
    of = gradient.meta["val"]
    if of.device.type not in DEVICES or of.dtype not in DTYPES or of.shape[1] % CHANNELS_MULTIPLE:
        return None
    return Backward(gradient, offsets, result, window) if result.meta["val"].dtype == of.dtype else None


def _one_operator(indices: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The gradient that goes in, and the one that comes out."""
    for user in indices.users:
        if user.target is aten.max_pool2d_with_indices_backward.default and user.args[-1] is indices:
            return cast(fx.Node, user.args[0]), user
    return None


def _sum_at_indices(indices: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    for node in _on(indices):
        for user in node.users:
            if user.target is aten.scatter_add.default and user.args[1:3] == (1, node) and _is_zero(user.args[0]):
                return cast(fx.Node, user.args[3]), user
    return None


def _is_zero(node: Any) -> bool:
    return node.target is aten.full.default and node.args[1] == 0


def _on(node: fx.Node) -> Iterator[fx.Node]:
    """The node, and what has the same numbers after it, as long as nobody else uses what is on the way.

    In another format too, for which a sum is rounded: the kernel does so in the same place.
    """
    yield node
    while len(node.users) == 1:
        (node,) = node.users
        if not _has_same_numbers(node, lambda dtype: dtype in DTYPES):
            return
        yield node


def _back(node: fx.Node) -> Iterator[fx.Node]:
    """The node, and what has the same numbers before it, with all of their digits."""
    yield node
    while _has_same_numbers(node, lambda dtype: dtype == torch.float32):
        node = cast(fx.Node, node.args[0])
        yield node


def _has_same_numbers(node: fx.Node, in_format: Callable[[Any], bool]) -> bool:
    """As its only input, in the same order, whatever their shape and places in memory are."""
    if node.target is prims.convert_element_type.default:
        return in_format(node.args[1])
    return node.target in OTHER_VIEWS


def _has_channels_last(node: fx.Node, size: list[int]) -> bool:
    """Whether it is of images of that size whose channels lie side by side."""
    return has_channels_last(node) and list(node.meta["val"].shape[2:]) == size
