"""A decoder-only transformer: GPT-2 and GPT-3 by default, Llama with rotary positions, RMSNorm, SwiGLU and GQA."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradus.models.flops import FORWARD_AND_BACKWARD
from gradus.models.initialise import BareLayers, init_transformer
from gradus.models.layers import (
    Attention,
    GeluMLP,
    LayerNorm,
    PreNormBlock,
    RMSNorm,
    Rotary,
    SwigluMLP,
    require_length,
)
from gradus.models.output import LossOutput, classification_loss
from gradus.models.settings import GPTSettings


def make_norm(settings: GPTSettings) -> nn.Module:
    if settings.norm == "rmsnorm":
        return RMSNorm(settings.width, eps=settings.norm_eps)
    return LayerNorm(settings.width, eps=settings.norm_eps, bias=settings.bias)


def make_block(settings: GPTSettings, rotary: Rotary | None) -> PreNormBlock:
    attention = Attention(
        settings.width,
        settings.heads,
        kv_heads=settings.kv_heads,
        causal=True,
        bias=settings.bias,
        dropout=settings.dropout,
        rotary=rotary,
    )
    return PreNormBlock(lambda: make_norm(settings), attention, make_mlp(settings), settings.dropout)


def make_mlp(settings: GPTSettings) -> nn.Module:
    if settings.activation == "swiglu":
        return SwigluMLP(settings.width, settings.inner_width, bias=settings.bias)
    approximate = "tanh" if settings.activation == "gelu-tanh" else "none"
    return GeluMLP(settings.width, settings.inner_width, bias=settings.bias, approximate=approximate)


class Embedding(nn.Module):
    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.context = settings.context
        self.token = nn.Embedding(settings.vocabulary, settings.width)
        learned = settings.positions == "learned"
        self.position = nn.Embedding(settings.context, settings.width) if learned else None
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        require_length(length, self.context)
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(length, device=tokens.device))
        y: Tensor = self.dropout(x)
        return y


class Head(nn.Module):
    """Final norm, output projection and loss in one module, so that a compiler can fuse the loss with what feeds it."""

    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.norm = make_norm(settings)
        self.output = nn.Linear(settings.width, settings.vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor | LossOutput:
        logits: Tensor = self.output(self.norm(x))
        return logits if targets is None else classification_loss(logits, targets, self.training)


class GPT(nn.Module):
    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.settings = settings
        with BareLayers():
            # All blocks hold the same tables: a block needs nothing but its input, and the tables exist once.
            is_rotary = settings.positions == "rotary"
            rotary = Rotary(settings.head_width, settings.context, settings.rotary_base) if is_rotary else None
            self.embedding = Embedding(settings)
            self.blocks = nn.ModuleList(make_block(settings, rotary) for _ in range(settings.layers))
            self.head = Head(settings)
        self.init_weights()

    def init_weights(self) -> None:
        if self.settings.tied:  # here, because to_empty gives each of two tied parameters its own memory
            self.head.output.weight = self.embedding.token.weight
        init_transformer(self, residual_scale=(2 * self.settings.layers) ** -0.5)
        for layer in self.modules():
            if isinstance(layer, Rotary):
                layer.fill_tables()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor | LossOutput:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor | LossOutput = self.head(x, targets)
        return result

    def flops_per_sample(self) -> float:
        """Training FLOPs of `context` tokens. Causal attention is counted as the half square that it needs."""
        s = self.settings
        qkv_and_out = s.width * s.head_width * (2 * s.heads + 2 * s.key_value_heads)
        mlp = (3 if s.activation == "swiglu" else 2) * s.width * s.inner_width
        matmul_parameters = s.layers * (qkv_and_out + mlp) + s.width * s.vocabulary
        scores_and_mix = 2 * s.layers * s.context**2 * s.width
        return float(FORWARD_AND_BACKWARD * (2 * s.context * matmul_parameters + scores_and_mix))
