"""Bias gradients: in compiled code, summed in the kernel that writes what is summed.

The gradient of a layer's bias is the sum over all tokens of a matrix that two products read as well. torch's compiler
gives it a kernel of its own, which reads the matrix once more or computes it anew: a loop over all tokens does not look
like those of what made the matrix, which go sample by sample. Written as a sum over the tokens of each sample and then
over the samples, it does, and becomes a part of that kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from gradus.training.graph_editing import insert

aten, prims = torch.ops.aten, torch.ops.prims
DEVICES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)
VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
# Of samples × columns, each a sum by itself: with fewer, the kernel would leave a part of the GPU idle.
LEAST_SUMS = 2**14


def use_sums_by_sample(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        made = _what_is_summed(node)
        if made is None:
            continue
        value = node.meta["val"]
        with graph.inserting_before(node):
            of_samples = insert(graph, node, aten.sum.dim_IntList, made, [1], dtype=torch.float32)
            rows = insert(graph, node, aten.reshape.default, of_samples, [made.meta["val"].shape[0], -1])
            whole = insert(graph, node, aten.sum.dim_IntList, rows, [0], dtype=torch.float32)
            rounded = insert(graph, node, prims.convert_element_type.default, whole, value.dtype)
            shaped = insert(graph, node, aten.reshape.default, rounded, list(value.shape))
        node.replace_all_uses_with(shaped)
        graph.erase_node(node)


def _what_is_summed(node: fx.Node) -> fx.Node | None:
    """If it sums the rows of a matrix: what made that, (samples, tokens, ...), if a simple kernel did."""
    # Some versions of torch sum in fp32 and round afterwards, which others leave to the kernel.
    if node.target is not aten.sum.dim_IntList or node.kwargs not in ({}, {"dtype": torch.float32}):
        return None
    made: Any = node.args[0]
    matrix = made.meta["val"]
    if node.args[1] != [0] or matrix.dim() != 2:
        return None
    if matrix.device.type not in DEVICES or matrix.dtype not in DTYPES:
        return None
    while made.target in VIEWS:
        made = made.args[0]
    value = made.meta["val"]
    if value.dim() < 3 or not all(isinstance(size, int) for size in (*value.shape, *matrix.shape)):
        return None
    samples, tokens, *rest = value.shape
    if [samples * tokens, math.prod(rest)] != list(matrix.shape) or samples * matrix.shape[1] < LEAST_SUMS:
        return None
    return made if _is_simple(made) and not _uses_sums(made) else None


def _is_simple(node: fx.Node) -> bool:
    """Whether each of its numbers is made of one number, or a few, of what it is given."""
    if node.target in (aten.cat.default, prims.convert_element_type.default):
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _uses_sums(node: fx.Node) -> bool:
    """Whether a kernel that computes it has sums of its own, such as those of a norm: the compiler knows how to join
    sums over rows and columns, and would not know these."""
    waiting, seen = [node], {node}
    while waiting:
        for of in waiting.pop().all_input_nodes:
            if of in seen:
                continue
            seen.add(of)
            if of.target in (aten.sum.dim_IntList, aten.mean.dim, aten.var_mean.correction):
                return True
            if of.target in VIEWS or _is_simple(of) or of.target is aten.permute.default:
                waiting.append(of)
    return False
