"""The Vision Transformer: an image as a sequence of patches, classified by a token of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradus.models.flops import FORWARD_AND_BACKWARD
from gradus.models.initialise import BareLayers, init_transformer
from gradus.models.layers import Attention, GeluMLP, LayerNorm, PreNormBlock, blocks_tensor_plan
from gradus.models.output import LossOutput, classification_loss
from gradus.models.settings import ViTSettings


def make_norm(settings: ViTSettings) -> LayerNorm:
    return LayerNorm(settings.width, eps=1e-6)


def make_block(settings: ViTSettings) -> PreNormBlock:
    return PreNormBlock(
        lambda: make_norm(settings),
        Attention(settings.width, settings.heads, dropout=settings.dropout),
        GeluMLP(settings.width, settings.inner_width),
        settings.dropout,
    )


class Embedding(nn.Module):
    def __init__(self, settings: ViTSettings) -> None:
        super().__init__()
        self.patch = nn.Conv2d(settings.channels, settings.width, settings.patch, stride=settings.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, settings.width))
        self.position = nn.Parameter(torch.empty(1, 1 + settings.patches, settings.width))
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(len(images), -1, -1)
        x: Tensor = self.dropout(torch.cat((class_token, patches), dim=1) + self.position)
        return x


class Head(nn.Module):
    def __init__(self, settings: ViTSettings) -> None:
        super().__init__()
        self.norm = make_norm(settings)
        self.output = nn.Linear(settings.width, settings.classes)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | LossOutput:
        logits: Tensor = self.output(self.norm(x[:, 0]))
        return logits if labels is None else classification_loss(logits, labels, self.training)


class ViT(nn.Module):
    def __init__(self, settings: ViTSettings) -> None:
        super().__init__()
        self.settings = settings
        with BareLayers():
            self.embedding = Embedding(settings)
            self.blocks = nn.ModuleList(make_block(settings) for _ in range(settings.layers))
            self.head = Head(settings)
        self.init_weights()

    def init_weights(self, drawn_on: torch.device | None = None) -> None:
        init_transformer(self, drawn_on=drawn_on)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | LossOutput:
        x = self.embedding(images)
        for block in self.blocks:
            x = block(x)
        result: Tensor | LossOutput = self.head(x, labels)
        return result

    def tensor_plan(self, slices: int) -> dict[str, str]:
        """How tensor parallelism divides the layers. With the class token, the sequence does not fall into slices."""
        return blocks_tensor_plan(in_slices=False)

    def flops_per_sample(self) -> float:
        """Training FLOPs of one image. The patches and the class token go through the blocks, the class token on."""
        s = self.settings
        tokens = s.patches + 1
        block = 4 * s.width**2 + 2 * s.width * s.inner_width
        embed = s.patches * s.channels * s.patch**2 * s.width
        matmuls = embed + tokens * s.layers * block + s.width * s.classes
        scores_and_mix = 4 * s.layers * tokens**2 * s.width
        return float(FORWARD_AND_BACKWARD * (2 * matmuls + scores_and_mix))
