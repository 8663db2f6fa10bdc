"""A decoder-only transformer: GPT-2 and GPT-3 by default, Llama with rotary positions, RMSNorm, SwiGLU and GQA, and
DeepSeek-V3 with latent attention and a mixture of experts besides."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradus.models.documents import given, positions_in
from gradus.models.experts import Experts, MixtureOfExperts, Router, collected_routings
from gradus.models.flops import FORWARD_AND_BACKWARD
from gradus.models.initialise import BareLayers, fill_tables, init_transformer
from gradus.models.latent_attention import LatentAttention
from gradus.models.layers import (
    Attention,
    GeluMLP,
    LayerNorm,
    PreNormBlock,
    RMSNorm,
    Rotary,
    SwigluMLP,
    every_position,
    require_length,
    text_tensor_plan,
)
from gradus.models.output import LossOutput, layer_and_loss
from gradus.models.settings import GPTSettings


def make_norm(settings: GPTSettings) -> nn.Module:
    if settings.norm == "rmsnorm":
        return RMSNorm(settings.width, eps=settings.norm_eps)
    return LayerNorm(settings.width, eps=settings.norm_eps, bias=settings.bias)


def make_block(settings: GPTSettings, layer: int, rotary: Rotary | None) -> PreNormBlock:
    mlp = make_mixture(settings) if settings.has_experts(layer) else make_mlp(settings, settings.inner_width)
    return PreNormBlock(lambda: make_norm(settings), make_attention(settings, rotary), mlp, settings.dropout)


def make_rotary(settings: GPTSettings) -> Rotary | None:
    if settings.positions != "rotary":
        return None
    turned = settings.latent_widths[1] if settings.attention == "latent" else settings.head_width
    return Rotary(turned, settings.context, settings.rotary_base)


def make_attention(settings: GPTSettings, rotary: Rotary | None) -> nn.Module:
    if settings.attention == "latent":
        assert rotary is not None, "the settings were checked"
        assert settings.kv_rank is not None
        plain, turned, value = settings.latent_widths
        return LatentAttention(
            settings.width,
            settings.heads,
            query_rank=settings.query_rank,
            kv_rank=settings.kv_rank,
            plain_width=plain,
            rotary_width=turned,
            value_width=value,
            rotary=rotary,
            norm_eps=settings.norm_eps,
            bias=settings.bias,
            dropout=settings.dropout,
        )
    return Attention(
        settings.width,
        settings.heads,
        kv_heads=settings.kv_heads,
        causal=True,
        bias=settings.bias,
        dropout=settings.dropout,
        rotary=rotary,
    )


def make_mlp(settings: GPTSettings, inner: int) -> nn.Module:
    if settings.activation == "swiglu":
        return SwigluMLP(settings.width, inner, bias=settings.bias)
    approximate = "tanh" if settings.activation == "gelu-tanh" else "none"
    return GeluMLP(settings.width, inner, bias=settings.bias, approximate=approximate)


def make_mixture(settings: GPTSettings) -> MixtureOfExperts:
    assert settings.experts is not None
    router = Router(
        settings.width,
        settings.experts,
        settings.experts_per_token,
        scores=settings.router,
        scale=settings.expert_scale,
        biased=settings.balance == "bias",
    )
    # Several shared experts are one of their total width: every token uses all of them.
    shared = settings.shared_experts * settings.expert_width
    return MixtureOfExperts(
        router,
        Experts(settings.experts, settings.width, settings.expert_width, settings.activation),
        make_mlp(settings, shared) if shared else None,
        capacity_factor=settings.capacity_factor,
        balance_weight=settings.balance_weight if settings.balance == "loss" else None,
        balance_rate=settings.balance_rate if settings.balance == "bias" else None,
    )


class Embedding(nn.Module):
    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.context = settings.context
        self.positions = every_position  # replaced where the sequence is split over ranks
        self.token = nn.Embedding(settings.vocabulary, settings.width)
        learned = settings.positions == "learned"
        self.position = nn.Embedding(settings.context, settings.width) if learned else None
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        require_length(length, self.context)
        x = self.token(tokens)
        if self.position is not None:
            positions = self.positions(length, tokens.device) if documents is None else positions_in(documents)
            x = x + self.position(positions)
        y: Tensor = self.dropout(x)
        return y


class Head(nn.Module):
    """Final norm, output projection and loss in one module, so that a compiler can fuse the loss with what feeds it."""

    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.norm = make_norm(settings)
        self.output = nn.Linear(settings.width, settings.vocabulary, bias=False)
        self.loss = layer_and_loss  # replaced where the vocabulary is split over ranks, or the loss in chunks

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor | LossOutput:
        x = self.norm(x)
        if targets is None:
            logits: Tensor = self.output(x)
            return logits
        return LossOutput(*self.loss(self.output, x, targets, self.training))


class GPT(nn.Module):
    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.settings = settings
        with BareLayers():
            # All blocks hold the same tables: a block needs nothing but its input, and the tables exist once.
            rotary = make_rotary(settings)
            self.embedding = Embedding(settings)
            self.blocks = nn.ModuleList(make_block(settings, layer, rotary) for layer in range(settings.layers))
            self.head = Head(settings)
        if settings.tied:
            self.head.output.weight = self.embedding.token.weight
        self.init_weights()

    def init_weights(self, drawn_on: torch.device | None = None) -> None:
        init_transformer(self, residual_scale=(2 * self.settings.layers) ** -0.5, drawn_on=drawn_on)
        fill_tables(self)
        for layer in self.modules():
            if isinstance(layer, Router):
                layer.reset_bias()

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor | LossOutput:
        """With `documents`, the number of the document of each token, each document is by itself."""
        x = self.embedding(tokens, **given(documents=documents))
        with collected_routings(self.blocks) as routings:
            for block in self.blocks:
                x = block(x, **given(documents=documents))
        result: Tensor | LossOutput = self.head(x, targets)
        if routings and isinstance(result, LossOutput):
            balance = sum(mixture.balance_loss(routing) for mixture, routing in routings)
            # Times the count, by which the sum of all micro-batches and ranks is divided later on.
            result = result._replace(loss_sum=result.loss_sum + balance * result.count)
        return result

    def tensor_plan(self, slices: int) -> dict[str, str]:
        """How tensor parallelism divides the layers; into so many slices the sequence may be cut between blocks."""
        also = {"embedding.position": "slice", "head.norm": "sequence"}
        return text_tensor_plan(self.settings.context, slices, output="head.output", also_in_slices=also)

    def flops_per_sample(self) -> float:
        """Training FLOPs of `context` tokens. Causal attention is counted as the half square that it needs.

        Of a mixture, only the experts that a token uses count.
        """
        s = self.settings
        matrices = 3 if s.activation == "swiglu" else 2
        used_inner = (s.experts_per_token + s.shared_experts) * s.expert_width
        mixture = matrices * s.width * used_inner + s.width * (s.experts or 0)
        mlps = [mixture if s.has_experts(i) else matrices * s.width * s.inner_width for i in range(s.layers)]
        attention, scores_and_mix = self._attention_parameters()
        matmul_parameters = s.layers * attention + sum(mlps) + s.width * s.vocabulary
        squares = s.layers * s.context**2 * scores_and_mix
        return float(FORWARD_AND_BACKWARD * (2 * s.context * matmul_parameters + squares))

    def _attention_parameters(self) -> tuple[int, int]:
        """Of a layer: in its matrices, and multiplied by each other token's keys and values."""
        s = self.settings
        if s.attention == "heads":
            return s.width * s.head_width * (2 * s.heads + 2 * s.key_value_heads), 2 * s.width
        assert s.kv_rank is not None
        plain, turned, value = s.latent_widths
        queries = (s.query_rank or s.width) * s.heads * (plain + turned) + s.width * (s.query_rank or 0)
        keys_and_values = s.width * (s.kv_rank + turned) + s.kv_rank * s.heads * (plain + value)
        return queries + keys_and_values + s.heads * value * s.width, s.heads * (plain + turned + value)
