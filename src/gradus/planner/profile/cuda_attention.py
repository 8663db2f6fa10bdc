"""Attention as CUDA runs it: which kernel torch chooses for `scaled_dot_product_attention`, and what that one does.

The choice is that of ATen/native/transformers/cuda/sdp_utils.cpp in torch 2.11, with the cuDNN that comes with it
(9.15.1 or later): cuDNN is first on Hopper and data-center Blackwell, flash attention elsewhere. On an H200, all of 31
models and plans with attention ran the kernels that are chosen here, those with a dropout of 0.1 too
(benchmarks/measured/h200_kernels.json); later sources of torch keep cuDNN for dropout in sixteenths.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gradus.models import layers
from gradus.models.documents import flex_can
from gradus.planner.profile.cuda_kernels import ops
from gradus.planner.profile.mixed_formats import check_attention

aten = torch.ops.aten
Kernel = Literal["cudnn", "flash", "efficient", "math"]

_HALF = (torch.float16, torch.bfloat16)
_DEFAULT_ORDER = [1, 2, 0, 3]  # torch's numbers: flash, efficient, math, cuDNN
_BY_NUMBER: dict[int, Kernel] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
_CUDNN_WIDTH = 128
_FLASH_WIDTH = 256


class Attention(NamedTuple):
    """The arguments of `scaled_dot_product_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.q, self.k, self.v))


def let_documents_be(model: nn.Module) -> None:
    """Let a model's attention, in place, be counted as that of one document where a sequence has several.

    A GPU computes it without a mask in memory, and keeps what it keeps of one. How long the documents are, and so how
    much of the work is left out, only the data knows.
    """
    for module in model.modules():
        if vars(module).get("attend") is layers.attend:
            setattr(module, "attend", _attend_as_one)  # noqa: B010  (for mypy, modules hold tensors)


def _attend_as_one(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float, documents_bt: Tensor | None = None
) -> Tensor:
    if documents_bt is not None and flex_can(q, v, dropout):
        documents_bt = None
    return layers.attend(q, k, v, causal=causal, dropout=dropout, documents_bt=documents_bt)


def attention_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attention:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return Attention(
        given["query"],
        given["key"],
        given["value"],
        given.get("attn_mask"),
        given.get("dropout_p", 0.0),
        given.get("is_causal", False),
        given.get("scale"),
        given.get("enable_gqa", False),
    )


def chosen_kernel(a: Attention, capability: tuple[int, int]) -> Kernel:
    """The first kernel in torch's order that is allowed and can do it."""
    fits = {"cudnn": _cudnn_can, "flash": _flash_can, "efficient": _efficient_can}
    for kernel in _order(capability):
        if kernel == "math" or (_allowed(kernel) and fits[kernel](a, capability)):
            return kernel
    return "math"


def _order(capability: tuple[int, int]) -> list[Kernel]:
    numbers = [n for n in torch._C._get_sdp_priority_order() if n in _BY_NUMBER]
    if numbers == _DEFAULT_ORDER and capability[0] in (9, 10):
        numbers = [3, 1, 2, 0]
    return [_BY_NUMBER[n] for n in numbers]


def _allowed(kernel: Kernel) -> bool:
    """As set by `torch.nn.attention.sdpa_kernel` and its like."""
    if kernel == "cudnn":
        return torch._C._get_cudnn_sdp_enabled()
    if kernel == "flash":
        return torch._C._get_flash_sdp_enabled()
    return torch._C._get_mem_efficient_sdp_enabled()


def _alike(a: Attention, *, takes_groups: bool) -> bool:
    """What all fused kernels ask for."""
    q, k, v = a.q, a.k, a.v
    if not (q.ndim == k.ndim == v.ndim == 4 and q.dtype == k.dtype == v.dtype):
        return False
    if not (q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] and k.shape[2]):
        return False
    if any(t.stride(-1) != 1 and t.shape[-1] != 1 for t in (q, k, v)):
        return False
    if a.grouped and takes_groups:
        return k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0
    return bool(q.shape[1] == k.shape[1] == v.shape[1])


def _cudnn_can(a: Attention, capability: tuple[int, int]) -> bool:
    width, value_width = a.q.shape[-1], a.v.shape[-1]
    widths = max(width, value_width) <= _CUDNN_WIDTH or ((width, value_width) == (192, 128) and capability[0] >= 9)
    mask = a.mask
    mask_fits = mask is None or (
        not mask.requires_grad
        and mask.ndim in (2, 4)
        and all(
            have in (1, want)
            for have, want in zip(
                reversed(mask.shape), (a.k.shape[-2], a.q.shape[-2], a.q.shape[1], a.q.shape[0]), strict=False
            )
        )
    )
    return (
        capability >= (8, 0)
        and _alike(a, takes_groups=True)
        and a.q.dtype in _HALF
        and widths
        and width % 8 == 0
        and value_width % 8 == 0
        and mask_fits
        and a.k.shape[2] != 1
        and not (a.dropout and a.q.shape[2] == 1)
        and not torch.are_deterministic_algorithms_enabled()
    )


def _flash_can(a: Attention, capability: tuple[int, int]) -> bool:
    width = a.q.shape[-1]
    small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return (
        capability >= (8, 0)
        and _alike(a, takes_groups=True)
        and a.q.dtype in _HALF
        and a.mask is None
        and width == a.k.shape[-1] == a.v.shape[-1]
        and width <= _FLASH_WIDTH
        and not (a.causal and a.q.shape[-2] != a.k.shape[-2])
        and not (a.trains and small and width > 192 and (width <= 224 or a.dropout > 0))
    )


def _efficient_can(a: Attention, capability: tuple[int, int]) -> bool:
    half = a.q.dtype in _HALF
    aligned = 8 if half and capability >= (7, 0) else 4 if capability >= (8, 0) else 1
    return (
        _alike(a, takes_groups=False)
        and a.q.dtype in (torch.float16, torch.float32, *((torch.bfloat16,) if capability >= (8, 0) else ()))
        and a.q.shape[-1] == a.k.shape[-1]
        and a.q.shape[-1] % aligned == 0
        and a.v.shape[-1] % aligned == 0
        and (a.mask is None or a.mask.stride(-1) == 1 or a.mask.shape[-1] == 1)
    )


def attend(a: Attention, capability: tuple[int, int], fused: bool) -> Tensor:
    """Runs the operators that CUDA would."""
    check_attention(a.q, a.k, a.v, a.mask)
    if not fused and a.q.ndim == 4:
        return _as_in_2021(a)
    kernel = chosen_kernel(a, capability) if fused else "math"
    if kernel == "math":
        return _step_by_step(a)
    mask = _added(a.mask, a.q.dtype)
    if kernel == "cudnn":
        return _first(
            aten._scaled_dot_product_cudnn_attention(
                a.q, a.k, a.v, mask, a.trains, a.dropout, a.causal, False, scale=a.scale
            )
        )
    if kernel == "flash":
        return _flash(a)
    if mask is not None:
        mask = _aligned(mask, 8).expand(*a.q.shape[:-1], a.k.shape[-2])
    return _first(
        aten._scaled_dot_product_efficient_attention(a.q, a.k, a.v, mask, a.trains, a.dropout, a.causal, scale=a.scale)
    )


def _first(results: Any) -> Tensor:
    result: Tensor = results[0]
    return result


def _flash(a: Attention) -> Tensor:
    """Flash attention wants widths in multiples of eight: others are padded, and cut off again."""
    width = a.q.shape[-1]
    scale = a.scale if a.scale is not None else 1 / math.sqrt(width)
    q, k, v = (_padded(t, 8) for t in (a.q, a.k, a.v))
    output = _first(aten._scaled_dot_product_flash_attention(q, k, v, a.dropout, a.causal, False, scale=scale))
    return output if output.shape[-1] == width else output[..., :width]


def _padded(t: Tensor, multiple: int) -> Tensor:
    missing = -t.shape[-1] % multiple
    return torch.constant_pad_nd(t, (0, missing)) if missing else t


def _aligned(mask: Tensor, multiple: int) -> Tensor:
    """The mask, in rows that begin at aligned addresses."""
    length = mask.shape[-1]
    return mask if length == 1 or length % multiple == 0 else _padded(mask, multiple)[..., :length]


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask of yes and no as one that is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _step_by_step(a: Attention) -> Tensor:
    """Torch's math kernel: in float32, with all scores in memory."""
    dtype = a.q.dtype
    wide = torch.float32 if dtype in _HALF else dtype
    wide_q, k, v = (t.to(wide) for t in (a.q, a.k, a.v))
    root = math.sqrt(abs(a.scale) if a.scale is not None else 1 / math.sqrt(a.q.shape[-1]))
    q = wide_q * root
    mask = _added(a.mask, wide)
    if a.causal:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        mask = _added(allowed, wide)
    if a.grouped:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1) * root)
    if mask is not None:
        scores = scores.add(mask) if mask.requires_grad else scores.add_(mask)
    probabilities = aten._safe_softmax(scores, -1)
    del scores
    if a.dropout > 0:
        probabilities = aten.native_dropout(probabilities, a.dropout, True)[0]
    output = torch.matmul(probabilities, v).to(dtype)
    probabilities.to(dtype)  # torch's function returns them as well, to nobody
    return output


class _Rows(torch.autograd.Function):
    """[samples, heads, tokens, width] as [samples × heads, tokens, width] without a copy.

    Software of 2021 kept tokens in the first dimension so that this is a view. Here only sizes matter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        rows, tokens, width = x.shape[0] * x.shape[1], *x.shape[2:]
        if x.untyped_storage().nbytes() < (x.storage_offset() + x.numel()) * x.element_size():  # expanded
            return x.reshape(rows, tokens, width)
        return x.as_strided((rows, tokens, width), (tokens * width, width, 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view(ctx.shape)


def _as_in_2021(a: Attention) -> Tensor:
    """Megatron's attention before flash attention: three kernels and dropout, all scores in memory in 16 bit."""
    heads, shape = a.q.shape[1], (*a.q.shape[:-1], a.k.shape[-2])
    k, v = (t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1) for t in (a.k, a.v))
    q, k, v = (_Rows.apply(t) for t in (a.q, k, v))  # type: ignore[no-untyped-call]
    scale = a.scale if a.scale is not None else 1 / math.sqrt(a.q.shape[-1])
    into = torch.empty((q.shape[0], q.shape[1], k.shape[1]), dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(into, q, k.transpose(1, 2), beta=0.0, alpha=scale)
    del into
    probabilities = ops.scaled_masked_softmax(scores.view(shape), a.mask, a.causal)
    del scores
    if a.dropout > 0:
        probabilities = aten.native_dropout(probabilities, a.dropout, True)[0]
    output = torch.bmm(probabilities.view(q.shape[0], *shape[2:]), v)
    return output.view(*a.q.shape[:-1], a.v.shape[-1])
