"""What our graph passes share: new nodes, and how the tensors of a node lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg


def insert(graph: fx.Graph, instead_of: fx.Node, operator: Any, *inputs: Any) -> fx.Node:
    """A node for where the graph is being written, that knows what its result looks like."""
    node = graph.call_function(operator, inputs)
    with torch.no_grad():
        value = operator(*map_arg(inputs, lambda of: of.meta["val"]))
    node.meta = {**instead_of.meta, "val": value}  # with where it comes from, by which kernels are named
    return node


def has_channels_last(node: fx.Node) -> bool:
    """Whether it is of images whose channels lie side by side, in memory that has nothing else.

    A size of one may have any stride; the number of images need not be known.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 4:
        return False
    channels, height, width = value.shape[1:]
    if not all(isinstance(number, int) for number in (channels, height, width)):
        return False
    strides = (channels * height * width, 1, channels * width, channels)
    each = zip(value.stride(), strides, value.shape, strict=True)
    return all(stride == wanted or size == 1 for stride, wanted, size in each)
