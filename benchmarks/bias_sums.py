"""A lever: gradients of biases, in compiled code on a GPU, are summed by the kernel that writes what is summed.

The gradient of a Linear layer's bias is the sum over all tokens of a matrix that two products need besides. Where that
matrix comes from GELU's backward, or where it joins the gradients of queries, keys and values, torch's compiler writes
it and then reads all that it is made of once more, to sum it. The kernels of bias_sums_kernel.py do both at once.
gpu_levers.py measures it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gradus.training.graph_editing import insert
from gradus.training.graph_passes import GraphPasses, fingerprint

aten, prims = torch.ops.aten, torch.ops.prims
DEVICES = ("cuda",)  # where code that is compiled is Triton's anyway
DTYPES = (torch.bfloat16, torch.float16)
COLUMNS_MULTIPLE = 8  # so that in 16 bits each row begins where 16 bytes can be read at once
FEWEST_ROWS = 4096  # of fewer, all that is read is in the cache when it is read again
ROWS = 128  # of which a kernel gives the sums; these are summed after it
MOST_PARTS = 3
VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)

_library: Any = torch.library.Library("gradus", "FRAGMENT")  # type: ignore[no-untyped-call]
_GELU = "(Tensor gradient, Tensor x, bool by_tanh) -> "
_IN_ORDER = (torch.Tag.needs_fixed_stride_order,)
_library.define(f"gelu_backward_and_sums{_GELU}(Tensor, Tensor)", tags=_IN_ORDER)
_library.define(f"gelu_backward_sums_and_gelu{_GELU}(Tensor, Tensor, Tensor)", tags=_IN_ORDER)
_library.define("joined_and_sums(Tensor[] parts, int dim, int first_column) -> (Tensor, Tensor)", tags=_IN_ORDER)


def _gelu_backward_and_sums(gradient: Tensor, x: Tensor, by_tanh: bool) -> tuple[Tensor, Tensor]:
    from bias_sums_kernel import gelu_backward

    return gelu_backward(gradient, x, by_tanh, again=False)[:2]


def _gelu_backward_sums_and_gelu(gradient: Tensor, x: Tensor, by_tanh: bool) -> tuple[Tensor, ...]:
    from bias_sums_kernel import gelu_backward

    return cast(tuple[Tensor, ...], gelu_backward(gradient, x, by_tanh, again=True))


def _joined_and_sums(parts: Sequence[Tensor], dim: int, first_column: int) -> tuple[Tensor, Tensor]:
    from bias_sums_kernel import joined

    return joined(parts, dim, first_column)


def _sums_without_values(of: Tensor, width: Any) -> Tensor:
    height = of.numel() // width
    return of.new_empty(((height + ROWS - 1) // ROWS, width), dtype=torch.float32)


def _gelu_without_values(gradient: Tensor, x: Tensor, by_tanh: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _sums_without_values(x, x.shape[-1])


def _gelu_again_without_values(gradient: Tensor, x: Tensor, by_tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    return *_gelu_without_values(gradient, x, by_tanh), x.new_empty(x.shape)


def _joined_without_values(parts: Sequence[Tensor], dim: int, first_column: int) -> tuple[Tensor, Tensor]:
    size = [*parts[0].shape[:dim], sum(part.shape[dim] for part in parts), *parts[0].shape[dim + 1 :]]
    result = parts[0].new_empty(size)
    return result, _sums_without_values(result, result.shape[first_column:].numel())


for _name, _with_values, _without_values in (
    ("gelu_backward_and_sums", _gelu_backward_and_sums, _gelu_without_values),
    ("gelu_backward_sums_and_gelu", _gelu_backward_sums_and_gelu, _gelu_again_without_values),
    ("joined_and_sums", _joined_and_sums, _joined_without_values),
):
    _library.impl(_name, _with_values, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradus::{_name}", _without_values, lib=_library)


class PassesWithSums(GraphPasses):
    """Those of the product, and before them this one: what it looks for has torch's formulas for GELU."""

    def __init__(self) -> None:
        super().__init__()
        files = (Path(__file__), Path(__file__).with_name("bias_sums_kernel.py"))
        self._uuid = f"{super().uuid()} {fingerprint(files)}"

    def __call__(self, graph: fx.Graph) -> None:
        use_sums_of_biases(graph)
        super().__call__(graph)


@functools.cache
def passes_with_sums() -> PassesWithSums:
    """One for all: blocks share code only if they are compiled with options that are equal."""
    return PassesWithSums()


def use_sums_of_biases(graph: fx.Graph) -> None:
    from torch._inductor.pattern_matcher import stable_topological_sort

    found = False
    for node in list(graph.nodes):
        matrix = _summed(node)
        if matrix is None:
            continue
        made = _without_views(matrix)
        sums = _from_gelu(graph, made) or _from_join(graph, made, matrix)
        if sums is None:
            continue
        found = True
        with graph.inserting_before(node):
            total = insert(graph, node, aten.sum.dim_IntList, sums, *node.args[1:])
            rounded = insert(graph, node, prims.convert_element_type.default, total, node.meta["val"].dtype)
        node.replace_all_uses_with(rounded)
        graph.erase_node(node)
    if found:
        stable_topological_sort(graph)  # what GELU gives once more was needed before
        graph.eliminate_dead_code()


def _summed(node: fx.Node) -> fx.Node | None:
    """The matrix whose columns are summed here, if it is one of which the kernels write the like."""
    if node.target is not aten.sum.dim_IntList or node.args[1] != [0] or node.kwargs:
        return None
    matrix = cast(fx.Node, node.args[0])
    value = matrix.meta["val"]
    if value.device.type not in DEVICES or value.dtype not in DTYPES or value.dim() != 2:
        return None
    height, width = value.shape
    if not isinstance(height, int) or height < FEWEST_ROWS or width % COLUMNS_MULTIPLE:
        return None
    return matrix


def _without_views(node: fx.Node) -> fx.Node:
    while node.target in VIEWS:
        node = cast(fx.Node, node.args[0])
    return node


def _is_in_memory(node: Any) -> bool:
    """Whatever we do, and in the order in which its numbers count: nothing is computed on the way into a kernel."""
    if not isinstance(node, fx.Node) or not node.meta["val"].is_contiguous():
        return False
    while node.target in VIEWS or node.target is aten.permute.default:
        node = cast(fx.Node, node.args[0])
    return node.op == "placeholder" or node.target in PRODUCTS or _is_of_attention(node)


def _is_of_attention(node: fx.Node) -> bool:
    return node.target is operator.getitem and "attention" in str(cast(fx.Node, node.args[0]).target)


def _with_sums(graph: fx.Graph, instead_of: fx.Node, kernel: Any, *inputs: Any) -> list[fx.Node]:
    """What the kernel returns, each by itself."""
    both = insert(graph, instead_of, kernel, *inputs)
    return [insert(graph, instead_of, operator.getitem, both, number) for number in range(len(both.meta["val"]))]


# --- GELU


@dataclass(frozen=True)
class _Formulas:
    """How the compiler writes GELU and its backward."""

    gradient: fx.Node
    x: fx.Node
    backward: fx.Node
    forward: fx.Node


@functools.cache
def _formulas(dtype: torch.dtype, approximate: str) -> _Formulas:
    def run(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return aten.gelu_backward(gradient, x, approximate=approximate), aten.gelu(x, approximate=approximate)

    from torch._inductor.decomposition import select_decomp_table  # which takes seconds to import
    from torch.fx.experimental.proxy_tensor import make_fx

    with unset_fake_temporarily():
        examples = torch.ones(2, 2, 3, dtype=dtype).unbind()
        graph = make_fx(run, select_decomp_table(), tracing_mode="fake")(*examples).graph
    gradient, x = (node for node in graph.nodes if node.op == "placeholder")
    (output,) = (node for node in graph.nodes if node.op == "output")
    return _Formulas(gradient, x, *output.args[0])


def _from_gelu(graph: fx.Graph, made: fx.Node) -> fx.Node | None:
    """If it is made by the backward of a GELU: by a kernel from here on, whose sums this returns."""
    dtype = made.meta["val"].dtype
    for approximate in ("none", "tanh"):
        formulas, inputs = _formulas(dtype, approximate), dict[fx.Node, Any]()
        if not _is_made_as(made, formulas.backward, inputs):
            continue
        gradient, x = inputs[formulas.gradient], inputs[formulas.x]
        if not (_is_in_memory(gradient) and _is_in_memory(x)):
            return None
        again = [node for node in graph.nodes if _is_for_products(node) and _is_made_as(node, formulas.forward, inputs)]
        kernels = torch.ops.gradus.gelu_backward_and_sums, torch.ops.gradus.gelu_backward_sums_and_gelu
        kernel = kernels[bool(again)].default
        with graph.inserting_before(made):
            result, sums, *gelu = _with_sums(graph, made, kernel, gradient, x, approximate == "tanh")
        for old, new in ((made, result), *((node, gelu[0]) for node in again)):
            old.replace_all_uses_with(new)
        return sums
    return None


def _is_made_as(node: Any, formula: Any, inputs: dict[fx.Node, Any]) -> bool:
    """Whether it is computed by that formula; of what, is then in `inputs`, if it was not given there."""
    if not isinstance(formula, fx.Node):
        return type(node) is type(formula) and node == formula
    if formula.op == "placeholder":
        return inputs.setdefault(formula, node) is node
    if not isinstance(node, fx.Node) or node.target is not formula.target or node.kwargs != formula.kwargs:
        return False
    return len(node.args) == len(formula.args) and all(
        _is_made_as(one, other, inputs) for one, other in zip(node.args, formula.args, strict=True)
    )


def _is_for_products(node: fx.Node) -> bool:
    if node.target is not prims.convert_element_type.default:
        return False
    after = list(node.users)
    for user in after:
        if user.target in VIEWS or user.target is aten.permute.default:
            after += user.users
    return any(user.target in PRODUCTS for user in after)


# --- queries, keys and values


def _from_join(graph: fx.Graph, made: fx.Node, matrix: fx.Node) -> fx.Node | None:
    """If gradients are joined to make it: by a kernel from here on, whose sums this returns."""
    if made.target is not aten.cat.default:
        return None
    parts = cast(Sequence[fx.Node], made.args[0])
    size, width = made.meta["val"].shape, matrix.meta["val"].shape[1]
    dim = cast(int, made.args[1]) % len(size) if len(made.args) > 1 else 0
    columns = size[-1]
    first_column = len(size) - 1
    while first_column > 0 and columns < width:
        first_column -= 1
        columns *= size[first_column]
    if columns != width or dim < first_column or not 2 <= len(parts) <= MOST_PARTS:
        return None
    widths = [part.meta["val"].shape[dim:].numel() for part in parts]
    if not all(map(_is_in_memory, parts)) or any(width % COLUMNS_MULTIPLE for width in widths):
        return None
    with graph.inserting_before(made):
        result, sums = _with_sums(graph, made, torch.ops.gradus.joined_and_sums.default, parts, dim, first_column)
    made.replace_all_uses_with(result)
    return sums
