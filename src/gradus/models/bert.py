"""A post-norm encoder that predicts masked tokens, as BERT and RoBERTa do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.models.documents import given, positions_in
from gradus.models.flops import FORWARD_AND_BACKWARD
from gradus.models.initialise import BareLayers, init_transformer
from gradus.models.layers import Attention, GeluMLP, LayerNorm, every_position, require_length, text_tensor_plan
from gradus.models.output import LossOutput, layer_and_loss
from gradus.models.settings import BERTSettings


class Embedding(nn.Module):
    """Token, position and type (0 unless the batch says otherwise), summed and normalised."""

    def __init__(self, settings: BERTSettings) -> None:
        super().__init__()
        self.context = settings.context
        self.positions = every_position  # replaced where the sequence is split over ranks
        self.position_offset = settings.position_offset
        self.token = nn.Embedding(settings.vocabulary, settings.width)
        self.position = nn.Embedding(settings.position_offset + settings.context, settings.width)
        self.token_type = nn.Embedding(settings.type_vocabulary, settings.width)
        self.norm = LayerNorm(settings.width, eps=settings.norm_eps)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, tokens: Tensor, token_types: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        require_length(length, self.context)
        places = self.positions(length, tokens.device) if documents is None else positions_in(documents)
        positions = places + self.position_offset
        types = torch.zeros_like(positions) if token_types is None else token_types
        x = self.token(tokens) + self.position(positions) + self.token_type(types)
        y: Tensor = self.dropout(self.norm(x))
        return y


class PostNormBlock(nn.Module):
    """A transformer block that normalises the residual stream itself, after each branch."""

    def __init__(self, settings: BERTSettings) -> None:
        super().__init__()
        self.attention = Attention(settings.width, settings.heads, dropout=settings.dropout)
        self.attention_norm = LayerNorm(settings.width, eps=settings.norm_eps)
        self.mlp = GeluMLP(settings.width, settings.inner_width)
        self.mlp_norm = LayerNorm(settings.width, eps=settings.norm_eps)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        # By name: tensor parallelism changes what is given by position.
        x = self.attention_norm(x + self.dropout(self.attention(x, **given(documents=documents))))
        y: Tensor = self.mlp_norm(x + self.dropout(self.mlp(x)))
        return y


class Head(nn.Module):
    """RoBERTa's masked-token head; the decoder is the token embedding with a bias of its own."""

    def __init__(self, settings: BERTSettings) -> None:
        super().__init__()
        self.dense = nn.Linear(settings.width, settings.width)
        self.norm = LayerNorm(settings.width, eps=settings.norm_eps)
        self.decoder = nn.Linear(settings.width, settings.vocabulary)
        self.loss = layer_and_loss  # replaced where the vocabulary is split over ranks, or the loss in chunks

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor | LossOutput:
        x = self.norm(F.gelu(self.dense(x)))
        if targets is None:
            logits: Tensor = self.decoder(x)
            return logits
        return LossOutput(*self.loss(self.decoder, x, targets, self.training))


class BERT(nn.Module):
    def __init__(self, settings: BERTSettings) -> None:
        super().__init__()
        self.settings = settings
        with BareLayers():
            self.embedding = Embedding(settings)
            self.blocks = nn.ModuleList(PostNormBlock(settings) for _ in range(settings.layers))
            self.head = Head(settings)
            # Kept so that a published RoBERTa has all its weights. The loss does not use it, so it is frozen:
            # data parallelism would wait for a gradient that never comes.
            self.pooler = nn.Linear(settings.width, settings.width).requires_grad_(False) if settings.pooler else None
        self.head.decoder.weight = self.embedding.token.weight
        self.init_weights()

    def init_weights(self, drawn_on: torch.device | None = None) -> None:
        init_transformer(self, drawn_on=drawn_on)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        token_types: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor | LossOutput:
        """With `documents`, the number of the document of each token, each document is by itself."""
        x = self.embedding(tokens, token_types, **given(documents=documents))
        for block in self.blocks:
            x = block(x, **given(documents=documents))
        result: Tensor | LossOutput = self.head(x, targets)
        return result

    def tensor_plan(self, slices: int) -> dict[str, str]:
        """How tensor parallelism divides the layers; into so many slices the sequence may be cut between blocks."""
        also = dict.fromkeys(("embedding.position", "embedding.token_type"), "slice")
        also |= dict.fromkeys(("embedding.norm", "head.dense", "head.norm"), "sequence")
        return text_tensor_plan(self.settings.context, slices, output="head.decoder", also_in_slices=also)

    def flops_per_sample(self) -> float:
        """Training FLOPs of `context` tokens, each of which sees all others. The head works on every token."""
        s = self.settings
        block = 4 * s.width**2 + 2 * s.width * s.inner_width
        matmul_parameters = s.layers * block + s.width**2 + s.width * s.vocabulary
        scores_and_mix = 4 * s.layers * s.context**2 * s.width
        return float(FORWARD_AND_BACKWARD * (2 * s.context * matmul_parameters + scores_and_mix))
