"""Kernels that only CUDA has, as operators without a computation: torch has no way to trace them on fake tensors.

They have torch's names, arguments as torch's have them where that matters, and results and saved tensors of the right
sizes, in a namespace of their own. Each has its backward as an operator too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_NAMESPACE = "gradus_profile"
_library: Any = torch.library.Library(_NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
ops = torch.ops.gradus_profile


def _add(schema: str, shapes: Callable[..., Any], backward: Any = None, save: Any = None) -> None:
    """An operator: what it is called with, what comes out, and with `save` for `backward` how gradients flow back."""
    _library.define(schema)
    name = f"{_NAMESPACE}::{schema.partition('(')[0]}"
    torch.library.register_fake(name, shapes)
    if backward is not None:
        torch.library.register_autograd(name, backward, setup_context=save)


# --- RMSNorm: keeps its input and, for each row, one number


def _norm_shapes(input: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    rows = input.shape[: input.ndim - len(shape)]
    wide = torch.promote_types(input.dtype, torch.float32)
    return torch.empty_like(input), input.new_empty((*rows, *(1 for _ in shape)), dtype=wide)


def _norm_backward_shapes(
    grad: Tensor, input: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(weight) if weight is not None else input.new_empty(0)


def _save_norm(ctx: Any, inputs: Any, output: Any) -> None:
    input, ctx.shape, weight, _ = inputs
    ctx.save_for_backward(input, weight, output[1])
    ctx.set_materialize_grads(False)


def _norm_backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    input, weight, rstd = ctx.saved_tensors
    grad_input, grad_weight = ops._fused_rms_norm_backward(grad, input, ctx.shape, rstd, weight)
    return grad_input, None, None if weight is None else grad_weight, None


_add(
    "_fused_rms_norm(Tensor input, int[] shape, Tensor? weight, float eps) -> (Tensor, Tensor)",
    _norm_shapes,
    _norm_backward,
    _save_norm,
)
_add(
    "_fused_rms_norm_backward(Tensor grad, Tensor input, int[] shape, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)",
    _norm_backward_shapes,
)

# --- Softmax of 2021's Megatron: scales, masks and normalises in one kernel, keeps its result, works in place backwards


def _softmax_shapes(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return torch.empty_like(scores)


def _softmax_backward_shapes(grad: Tensor, output: Tensor) -> Tensor:
    return grad


def _save_softmax(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, grad: Tensor) -> Any:
    return ops.scaled_masked_softmax_backward_(grad, *ctx.saved_tensors), None, None


_add(
    "scaled_masked_softmax(Tensor scores, Tensor? mask, bool causal) -> Tensor",
    _softmax_shapes,
    _softmax_backward,
    _save_softmax,
)
_add(
    "scaled_masked_softmax_backward_(Tensor(a!) grad, Tensor output) -> Tensor(a!)",
    _softmax_backward_shapes,
)

# --- Recurrent layers of cuDNN: all layers and steps in one call

# What cuDNN keeps for backward, in numbers for each unit of a layer at each step: the gates, and the cell of an LSTM or
# the hidden part of a GRU's candidate. Besides, what a layer hands to the next: its output and, with dropout, a bit for
# each number. cuDNN does not document it; an LSTM of two layers with dropout on an H200 came to that and 256 bytes
# (742,392,064 for 128 × 256 × 1024 in fp16, torch 2.11). GRU and plain layers are assumed to be like it.
RESERVED = {4: 5, 3: 4, 1: 1}  # by gates: LSTM, GRU, plain


def _rnn_shapes(
    input: Tensor,
    weights: Sequence[Tensor],
    hx: Tensor,
    cx: Tensor | None,
    gates: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    directions = 2 if bidirectional else 1
    hidden = weights[1].shape[0] // gates
    positions = math.prod(input.shape[:-1])
    output = input.new_empty((*input.shape[:-1], hx.shape[-1] * directions))
    units = positions * hidden * directions
    kept = units * (layers * RESERVED[gates] + layers - 1) * input.element_size()
    if dropout > 0:
        kept += units * (layers - 1) // 8
    reserve = input.new_empty(kept if train else 0, dtype=torch.uint8)
    return output, torch.empty_like(hx), torch.empty_like(cx) if cx is not None else hx.new_empty(0), reserve


def _rnn_backward_shapes(
    grad: Tensor,
    input: Tensor,
    weights: Sequence[Tensor],
    hx: Tensor,
    cx: Tensor | None,
    output: Tensor,
    reserve: Tensor,
    gates: int,
    layers: int,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    cell = torch.empty_like(cx) if cx is not None else hx.new_empty(0)
    return torch.empty_like(input), torch.empty_like(hx), cell, [torch.empty_like(w) for w in weights]


def _save_rnn(ctx: Any, inputs: Any, output: Any) -> None:
    input, weights, hx, cx, ctx.gates, ctx.layers = inputs[:6]
    ctx.bidirectional = inputs[9]
    ctx.save_for_backward(input, hx, cx, output[0], output[3], *weights)
    ctx.set_materialize_grads(False)


def _rnn_backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> Any:
    input, hx, cx, output, reserve, *weights = ctx.saved_tensors
    if grad is None:  # only the last state was used
        grad = torch.zeros_like(output)
    grad_input, grad_hx, grad_cx, grad_weights = ops._cudnn_rnn_backward(
        grad, input, weights, hx, cx, output, reserve, ctx.gates, ctx.layers, ctx.bidirectional
    )
    return grad_input, grad_weights, grad_hx, None if cx is None else grad_cx, *(None for _ in range(7))


_add(
    "_cudnn_rnn(Tensor input, Tensor[] weights, Tensor hx, Tensor? cx, int gates, int layers, bool batch_first, "
    "float dropout, bool train, bool bidirectional, Tensor? batch_sizes) -> (Tensor, Tensor, Tensor, Tensor)",
    _rnn_shapes,
    _rnn_backward,
    _save_rnn,
)
_add(
    "_cudnn_rnn_backward(Tensor grad, Tensor input, Tensor[] weights, Tensor hx, Tensor? cx, Tensor output, "
    "Tensor reserve, int gates, int layers, bool bidirectional) -> (Tensor, Tensor, Tensor, Tensor[])",
    _rnn_backward_shapes,
)


@register_flop_formula(ops._cudnn_rnn, get_raw=True)
def _rnn_flops(input: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Every matrix once for each position."""
    return 2 * math.prod(input.shape[:-1]) * sum(w.numel() for w in weights if w.ndim == 2)


@register_flop_formula(ops._cudnn_rnn_backward, get_raw=True)
def _rnn_backward_flops(grad: Tensor, input: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return 2 * _rnn_flops(input, weights)


# --- One step of an LSTM, of which the products are done: keeps the gates


def _cell_shapes(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(input_gates)


def _cell_backward_shapes(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    bias = gates.new_empty(gates.shape[1] if has_bias else 0)
    return torch.empty_like(gates), torch.empty_like(cx), bias


def _save_cell(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.has_bias = inputs[3] is not None
    ctx.save_for_backward(inputs[2], output[1], output[2])
    ctx.set_materialize_grads(False)


def _cell_backward(ctx: Any, grad_hy: Tensor | None, grad_cy: Tensor | None, _: Any) -> Any:
    grad_gates, grad_cx, grad_bias = ops._thnn_fused_lstm_cell_backward(
        grad_hy, grad_cy, *ctx.saved_tensors, ctx.has_bias
    )
    biases = (grad_bias, grad_bias) if ctx.has_bias else (None, None)
    return grad_gates, grad_gates, grad_cx, *biases


_add(
    "_thnn_fused_lstm_cell(Tensor input_gates, Tensor hidden_gates, Tensor cx, Tensor? input_bias, "
    "Tensor? hidden_bias) -> (Tensor, Tensor, Tensor)",
    _cell_shapes,
    _cell_backward,
    _save_cell,
)
_add(
    "_thnn_fused_lstm_cell_backward(Tensor? grad_hy, Tensor? grad_cy, Tensor cx, Tensor cy, Tensor gates, "
    "bool has_bias) -> (Tensor, Tensor, Tensor)",
    _cell_backward_shapes,
)


def recurrent(gates: int, args: Sequence[Any], autocast: bool) -> tuple[Tensor, ...]:
    """`torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu` with their arguments, as cuDNN runs them."""
    packed = isinstance(args[1], Tensor) and not isinstance(args[2], bool) and isinstance(args[3], (list, tuple))
    if packed:
        data, sizes, state, weights, _, layers, dropout, train, bidirectional = args
        batch_first = False
    else:
        data, state, weights, _, layers, dropout, train, bidirectional, batch_first = args
        sizes = None
    hx, cx = state if isinstance(state, (list, tuple)) else (state, None)
    if autocast:  # always to fp16, whatever autocast's own format is, and anew in each call
        data, hx, cx, weights = (_half(x) for x in (data, hx, cx, weights))
    output, hy, cy, _ = ops._cudnn_rnn(
        data, list(weights), hx, cx, gates, layers, batch_first, dropout, train, bidirectional, sizes
    )
    return (output, hy, cy) if cx is not None else (output, hy)


def _half(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_half(one) for one in x]
    return x.to(torch.float16) if isinstance(x, Tensor) and x.dtype != torch.float64 else x
