"""Operators: what kind of work each of torch's operators is, in which shape, and how many floating-point operations.

Only shapes are looked at. What is not known by name counts as pointwise: it reads its inputs and writes its outputs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from gradus.planner.profile.program import Kind

aten = torch.ops.aten


class Work(NamedTuple):
    kind: Kind
    flops: float
    shape: tuple[int, ...]
    causal: bool
    kernels: int


_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "addbmm", "mv", "addmv", "dot", "_int_mm"}
_CONVOLUTIONS = {"convolution", "convolution_backward", "_convolution", "cudnn_convolution", "convolution_overrideable"}
_RANDOM = {"native_dropout", "bernoulli", "bernoulli_", "rand", "randn", "rand_like", "randn_like", "multinomial"}
_RANDOM |= {"uniform_", "normal_", "randint", "randint_like", "randperm", "exponential_"}
_LOOKUPS = {"embedding", "embedding_dense_backward", "index", "index_put", "index_put_", "_unsafe_index_put", "gather"}
_LOOKUPS |= {"_unsafe_index", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_select", "index_add"}
_LOOKUPS |= {"index_add_", "index_copy", "index_copy_", "gather_backward", "_embedding_bag", "nll_loss_forward"}
_LOOKUPS |= {"nll_loss_backward", "index_select_backward", "sort", "topk", "argsort", "searchsorted", "bucketize"}
_COPIES = {"_to_copy", "clone", "copy_", "copy", "cat", "stack", "contiguous", "roll", "flip", "constant_pad_nd"}
_COPIES |= {"slice_backward", "select_backward", "slice_scatter", "select_scatter", "repeat", "expand_copy"}
_REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod", "var", "std"}
_REDUCTIONS |= {"var_mean", "linalg_vector_norm", "_softmax", "_softmax_backward_data", "_log_softmax", "logsumexp"}
_REDUCTIONS |= {"_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward", "native_group_norm"}
_REDUCTIONS |= {"native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward", "cumsum", "cumprod"}
_REDUCTIONS |= {"cudnn_batch_norm", "cudnn_batch_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"}
_REDUCTIONS |= {"miopen_batch_norm", "_native_batch_norm_legit", "batch_norm_backward", "avg_pool2d_backward"}
_REDUCTIONS |= {"avg_pool2d", "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "_adaptive_avg_pool2d"}
_REDUCTIONS |= {"_adaptive_avg_pool2d_backward", "bincount", "histc", "nonzero", "mse_loss", "smooth_l1_loss"}

# How often an operator launches where that is not once. Counted in traces of torch on CUDA: a sort is several passes,
# and backward of norms and tables sums up in a second kernel.
_KERNELS = {
    "native_layer_norm_backward": 2,
    "native_group_norm_backward": 3,
    "native_group_norm": 2,
    "_fused_rms_norm_backward": 2,
    "convolution_backward": 2,
    "embedding_dense_backward": 6,
    "index_put": 6,
    "index_put_": 6,
    "sort": 4,
    "argsort": 4,
    "topk": 3,
    "cumsum": 2,
    "nonzero": 3,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 2,
    "_scaled_dot_product_cudnn_attention_backward": 3,
}


def name_of(func: Any) -> str:
    """Without namespace and overload: "mm" of aten.mm.default."""
    return str(func._schema.name).partition("::")[2]


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
    name = name_of(func)
    kernels = _KERNELS.get(name, 1)
    if "scaled_dot_product" in name or name in ("_flash_attention_forward", "_flash_attention_backward"):
        return _attention(func, name, args, kwargs, out, kernels)
    if name in _MATMULS:
        shape = _matmul_shape(name, args, kwargs, out)
        return Work("matmul", 2.0 * math.prod(shape), shape, False, kernels)
    if name in _CONVOLUTIONS:
        return _convolution(name, args, kwargs, out, kernels)
    if "rnn" in name or "lstm" in name or "gru" in name:
        return Work("recurrent", _counted(func, args, kwargs, out), (), False, kernels)
    kind: Kind = "pointwise"
    for known, names in (("random", _RANDOM), ("lookup", _LOOKUPS), ("copy", _COPIES), ("reduction", _REDUCTIONS)):
        if name in names:
            kind = known  # type: ignore[assignment]
    return Work(kind, 0.0, (), False, kernels)


def _counted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """As torch's own counter has it."""
    formula = flop_registry.get(func._overloadpacket)
    return float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0


def _matmul_shape(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, ...]:
    a, b = (args[1], args[2]) if name.startswith(("add", "badd")) else (args[0], args[1])
    if name == "_grouped_mm":
        return _grouped_shape(a, b)
    if name == "dot":
        return 1, 1, 1, a.shape[0]
    if name in ("mv", "addmv"):
        return 1, a.shape[0], 1, a.shape[1]
    if name in ("bmm", "baddbmm", "addbmm"):
        return a.shape[0], a.shape[1], b.shape[2], a.shape[2]
    return 1, a.shape[0], b.shape[1], a.shape[1]


def _grouped_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Each row goes through one of the groups; in the gradient of the weights, each row adds to one of them."""
    if a.ndim == 2 and b.ndim == 3:
        return b.shape[0], a.shape[0] // max(1, b.shape[0]), b.shape[2], a.shape[1]
    if a.ndim == 2 and b.ndim == 2:
        return 1, a.shape[0], b.shape[1], a.shape[1]
    return a.shape[0], a.shape[1], b.shape[-1], a.shape[2]


def _convolution(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, kernels: int) -> Work:
    if name == "convolution_backward":
        grad, x, weight = args[0], args[1], args[2]
        transposed, groups, wanted = bool(args[7]), int(args[9]), args[10]
        result: Tensor = x if transposed else grad
        ways = int(wanted[0]) + int(wanted[1])
    else:
        x, weight = args[0], args[1]
        transposed = bool(args[6]) if len(args) > 6 else False
        groups = int(args[8]) if len(args) > 8 else 1
        result, ways = (x if transposed else out), 1
    # A transposed convolution does for each input what a plain one does for each output.
    positions = result.shape[0] * math.prod(result.shape[2:])
    shape = (groups, positions, weight.shape[0] // groups, math.prod(weight.shape[1:]))
    return Work("convolution", 2.0 * math.prod(shape) * ways, shape, False, max(1, ways) if ways else 1)


_BACKWARD_PRODUCTS = 2.5  # five products of matrices, where forward has two: flash attention computes scores again


def _attention(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, kernels: int) -> Work:
    backward = name.endswith("backward")
    first = 1 if backward else 0
    q, k, v = args[first], args[first + 1], args[first + 2]
    causal = _is_causal(func, args, kwargs)
    samples, heads, queries, width = q.shape
    keys, value_width = k.shape[-2], v.shape[-1]
    pairs = queries * keys / (2.0 if causal else 1.0)
    flops = 2.0 * samples * heads * pairs * (width + value_width)
    shape = (samples, heads, k.shape[1], queries, keys, width)
    return Work("attention", flops * (_BACKWARD_PRODUCTS if backward else 1.0), shape, causal, kernels)


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[position] if position < len(args) else kwargs.get("is_causal", argument.default_value))
    return False
