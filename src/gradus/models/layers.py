"""The pieces that the transformers share: norms, rotary positions, attention, MLPs, the pre-norm block."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.models.documents import attend_inside, given, positions_in
from gradus.schema.errors import InputError


class LayerNorm(nn.LayerNorm):
    """LayerNorm computed in float32 or wider, whatever the dtype of its input and of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = widened(self.weight), None if self.bias is None else widened(self.bias)
        return F.layer_norm(widened(x), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """RMSNorm computed in float32 or wider, whatever the dtype of its input and of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else widened(self.weight)
        return F.rms_norm(widened(x), self.normalized_shape, weight, self.eps).to(x.dtype)


def widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def every_position(length: int, device: torch.device) -> Tensor:
    """The positions of the tokens that a model is given: all of a sequence."""
    return torch.arange(length, device=device)


class Rotary(nn.Module):
    """Rotary positions: turns each pair of a head's numbers by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, context: int, base: float) -> None:
        super().__init__()
        self.base = base
        self.positions = every_position  # replaced where the sequence is split over ranks
        # In bfloat16 neighbouring positions would share an angle.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(context, head_width // 2, dtype=dtype), persistent=False)

    def fill_tables(self) -> None:
        context, pairs = self.cos.shape
        exponents = torch.arange(pairs, device=self.cos.device, dtype=torch.float64) / pairs
        positions = torch.arange(context, device=self.cos.device, dtype=torch.float64)
        angles = torch.outer(positions, self.base**-exponents)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x_bhtd: Tensor, documents_bt: Tensor | None = None) -> Tensor:
        if documents_bt is None:
            positions = self.positions(x_bhtd.shape[-2], x_bhtd.device)
        else:
            positions = positions_in(documents_bt).unsqueeze(1)  # alike in all heads
        cos, sin = self.cos[positions], self.sin[positions]
        a, b = x_bhtd.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_bhtd.dtype)


def attend(
    q_bhtd: Tensor,
    k_bhtd: Tensor,
    v_bhtd: Tensor,
    *,
    causal: bool,
    dropout: float,
    documents_bt: Tensor | None = None,
) -> Tensor:
    """Softmax attention; where there are fewer key-value heads than heads, each of them serves a group of them."""
    if documents_bt is not None:
        return attend_inside(q_bhtd, k_bhtd, v_bhtd, documents_bt, causal=causal, dropout=dropout)
    grouped = k_bhtd.shape[1] != q_bhtd.shape[1]
    return F.scaled_dot_product_attention(
        q_bhtd, k_bhtd, v_bhtd, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
    )


class Attention(nn.Module):
    """Multi-head attention; with fewer key-value heads than heads, each of them serves a group (GQA)."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads or heads
        self.head_width = width // heads
        self.causal = causal
        self.dropout = dropout
        self.rotary = rotary
        self.attend = attend  # replaced where the sequence is split over ranks
        # One matrix multiplication for all three. Its rows come in groups, one for each key-value head: the queries
        # that it serves, its key, its value. So any share of the groups is attention of its own.
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.head_width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x_btd: Tensor, documents: Tensor | None = None) -> Tensor:
        queries = self.heads // self.kv_heads
        # As many groups as there are: a rank may hold only some of them.
        grouped_btgnd = self.qkv(x_btd).unflatten(-1, (-1, queries + 2, self.head_width))
        q, k, v = (
            part_btgnd.flatten(2, 3).transpose(1, 2) for part_btgnd in grouped_btgnd.split([queries, 1, 1], dim=-2)
        )
        if self.rotary is not None:
            q, k = self.rotary(q, documents), self.rotary(k, documents)
        dropout = self.dropout if self.training else 0.0
        mixed_bhtd = self.attend(q, k, v, causal=self.causal, dropout=dropout, **given(documents_bt=documents))
        mixed_btd: Tensor = self.out(mixed_bhtd.transpose(1, 2).flatten(2))
        return mixed_btd


class GeluMLP(nn.Module):
    def __init__(self, width: int, inner: int, *, bias: bool = True, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x), approximate=self.approximate))
        return y


class SwigluMLP(nn.Module):
    def __init__(self, width: int, inner: int, *, bias: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class PreNormBlock(nn.Module):
    """A transformer block that normalises what each branch reads, and leaves the residual stream as it is."""

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module, dropout: float) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.mlp_norm = norm()
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        # By name: tensor parallelism changes what is given by position.
        x = x + self.dropout(self.attention(self.attention_norm(x), **given(documents=documents)))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


def blocks_tensor_plan(in_slices: bool) -> dict[str, str]:
    """How tensor parallelism divides `blocks`: whole heads, and shares of what is inside the MLP.

    With `in_slices`, each rank has a slice of the sequence between a block's branches: what they add is scattered, and
    gathered before the next.
    """
    plan = {
        "blocks.*.attention.qkv": "colwise",
        "blocks.*.attention.out": "rowwise_scatter" if in_slices else "rowwise",
        "blocks.*.mlp.gate": "colwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise_scatter" if in_slices else "rowwise",
    }
    if in_slices:
        plan |= {"blocks.*.attention": "gather", "blocks.*.mlp": "gather", "blocks.*_norm": "sequence"}
    return plan


def text_tensor_plan(context: int, slices: int, *, output: str, also_in_slices: dict[str, str]) -> dict[str, str]:
    """How tensor parallelism divides a model of tokens: its blocks, its vocabulary in the table and in the `output`.

    The sequence may be cut into so many `slices` between blocks, if they divide the longest one; `also_in_slices` are
    the layers that then take slices.
    """
    in_slices = slices > 1 and context % slices == 0
    return {
        **blocks_tensor_plan(in_slices),
        "embedding.token": "rowwise_scatter" if in_slices else "rowwise",
        output: "vocabulary_gather" if in_slices else "vocabulary",
        **(also_in_slices if in_slices else {}),
    }


def require_length(length: int, context: int) -> None:
    """Raise if a sequence is longer than the model has positions; on a GPU it would fail far from here, if at all."""
    if length > context:
        raise InputError(
            f"model.context: found a sequence of {length} tokens. Allowed: at most {context}",
            hint=f"set model.context to {length}, or make the data's sequences shorter",
            field="model.context",
            found=length,
            allowed=context,
        )
