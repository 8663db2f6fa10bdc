"""Cheap functions: in compiled code, GELU of 16-bit numbers with as many digits as its result can show, and no more.

A GPU's library computes erf and tanh to the last digit of 32 bits, which takes longer than to read and write numbers of
16 bits. These keep not half of the digits. So the graphs of models in 16 bits, forward and backward, get formulas of
half the length; those of models in 32 bits are left as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from gradus.training.graph_editing import insert

aten, prims = torch.ops.aten, torch.ops.prims
Do = Callable[..., Any]  # do(operator, *inputs): runs an operator, or writes it into a graph
NARROW = (torch.bfloat16, torch.float16)

# 1 - erf(x) = 2^(c1·x + c2·x² + … + c8·x⁸) for x ≥ 0: the least maximum of the error of erf, 1.6e-8 before rounding.
# The last is negative, as is the slope everywhere: beyond the last digit, erf is 1, with no need for a limit.
ERFC_EXPONENT = (
    -1.62790859,
    -0.918416381,
    -0.148481607,
    0.0282536801,
    -0.000774629239,
    -0.00148944184,
    0.000445507671,
    -4.53585999e-05,
)


# Powers are of 2, for which a GPU has an instruction; `exp` is nine of them, and a division five.


def erf(do: Do, x: Any) -> Any:
    """With an absolute error of 1e-7: for where 1 is added to it, since few digits of small results are right."""
    size = do(aten.abs.default, x)
    exponent = do(aten.mul.Tensor, size, ERFC_EXPONENT[-1])
    for coefficient in reversed(ERFC_EXPONENT[:-1]):
        exponent = do(aten.mul.Tensor, do(aten.add.Tensor, exponent, coefficient), size)
    rest = do(aten.exp2.default, exponent)
    return do(aten.copysign.Tensor, do(aten.add.Tensor, do(aten.neg.default, rest), 1.0), x)


def tanh(do: Do, x: Any) -> Any:
    """With an absolute error of 2e-7; see `erf`. What overflows for a very negative x leaves -1, as it should."""
    power = do(aten.exp2.default, do(aten.mul.Tensor, x, -2.0 / math.log(2.0)))
    share = do(aten.reciprocal.default, do(aten.add.Tensor, power, 1.0))
    return do(aten.add.Tensor, do(aten.mul.Tensor, share, 2.0), -1.0)


def exp_of_product(do: Do, x: Any, factor: float) -> Any:
    """exp(x · factor), with a relative error of 4e-6: the product that is there anyway is made one for a power of 2."""
    return do(aten.exp2.default, do(aten.mul.Tensor, x, factor / math.log(2.0)))


def use_cheap_functions(graph: fx.Graph) -> None:
    narrow: set[fx.Node] = set()  # what is made of nothing but 16-bit numbers, whatever it is kept in
    for node in list(graph.nodes):
        if not _is_narrow(node, narrow):
            continue
        narrow.add(node)
        if node.op != "call_function" or node.meta["val"].dtype != torch.float32:
            continue
        with graph.inserting_before(node):
            cheap = _cheap(node, functools.partial(insert, graph, node))
        if cheap is not None:
            narrow.add(cheap)
            _replace(node, cheap)


def _is_narrow(node: fx.Node, narrow: set[fx.Node]) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return False
    if value.dtype in NARROW:
        return True
    if node.op != "call_function" or not _is_pointwise(node.target):
        return False
    inputs = [of for of in node.all_input_nodes if not _is_single_number(of)]
    return bool(inputs) and all(of in narrow for of in inputs)


def _is_pointwise(target: Any) -> bool:
    # Conversions by name: not every torch tags them, and without them nothing would ever be found.
    return target is prims.convert_element_type.default or torch.Tag.pointwise in getattr(target, "tags", ())


def _is_single_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value.dim() == 0 if isinstance(value, Tensor) else value is not None


def _cheap(node: fx.Node, do: Do) -> fx.Node | None:
    """What is to stand in the place of a function of 16-bit numbers."""
    result: fx.Node | None = None
    if node.target is aten.erf.default and _is_beside_one(node):
        result = erf(do, node.args[0])
    elif node.target is aten.tanh.default and _is_beside_one(node):
        result = tanh(do, node.args[0])
    elif node.target is aten.exp.default:
        of = node.args[0]
        if isinstance(of, fx.Node) and of.target is aten.mul.Tensor and isinstance(of.args[1], int | float):
            result = exp_of_product(do, of.args[0], of.args[1])
    return result


def _is_beside_one(node: fx.Node) -> bool:
    """Whether it is only used as 1 + y and 1 - y², as GELU does: there, digits below those of 1 are lost anyway."""
    return all(
        _is(user, aten.add.Tensor, node, 1)
        or (_is(user, aten.mul.Tensor, node, node) and all(_is(last, aten.sub.Tensor, 1, user) for last in user.users))
        for user in node.users
    )


def _is(node: fx.Node, operator: Any, *inputs: Any) -> bool:
    return node.target is operator and node.args == inputs and not node.kwargs


def _replace(node: fx.Node, cheap: fx.Node) -> None:
    node.replace_all_uses_with(cheap)
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for of in inputs:
        if not of.users and of.op == "call_function":
            of.graph.erase_node(of)
