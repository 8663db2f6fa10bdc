"""Small models with everything a compiler meets, and what the planner's trace of them is."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.planner.profile.assembly import Facts, assembled
from gradus.planner.profile.program import Part
from gradus.planner.profile.tracing import FakeModel, Numbers

SAMPLES = 4


def traced_whole(model: nn.Module, shape: tuple[int, ...]) -> Part:
    """As one part, though blocks of it may be alike."""
    with patch("gradus.planner.profile.tracing.repeated_blocks", return_value=[]):
        (part,) = traced(model, shape)
    return part


def traced(model: nn.Module, shape: tuple[int, ...], autocast: torch.dtype | None = None) -> list[Part]:
    """The parts of a model whose loss is the sum of its outputs."""
    fake = FakeModel(model, Numbers(autocast, narrow_parameters=False), {}, frozenset())

    def record(samples: int):
        batch = torch.empty(samples, *shape, requires_grad=True)
        return fake.trace(batch, samples, lambda model, batch, samples: model(batch).sum())

    parts, _, _ = assembled(record(2), record(4), (2, 4), Facts({}, frozenset()))
    return parts


def peak(part: Part, first: int, end: int, samples: float = SAMPLES) -> float:
    """The most bytes at once from one operator to another, gradients of parameters left out."""
    living = [s for s in part.storages if s.made >= 0 and s.role != "gradient"]
    return max(sum(s.bytes.at(samples) for s in living if s.made <= i <= s.last) for i in range(first, end))


class Perceptron(nn.Module):
    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    """A pre-norm transformer block; `mixed` computes its products in bfloat16, as autocast on CUDA does."""

    def __init__(self, width: int = 64, heads: int = 4, dropout: float = 0.0, mixed: bool = False) -> None:
        super().__init__()
        self.heads, self.mixed = heads, mixed
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def product(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), layer.weight.bfloat16()) if self.mixed else layer(x)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.product(self.qkv, self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.dropout(self.product(self.out, mixed))
        return x + self.product(self.down, F.gelu(self.product(self.up, self.second_norm(x))))


class PlainAttention(nn.Module):
    """With scores in memory."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = self.dropout(torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1))
        return x + self.out((scores @ v).transpose(1, 2).reshape(b, t, d))


class Gated(nn.Module):
    """The norm and the perceptron of a Llama."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up, self.gate = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


class InPlace(nn.Module):
    """As older convolution nets are written."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.relu(self.first(x)))).mean((2, 3))


class Skipping(nn.Module):
    """Two levels of a U-Net."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 1)
        self.last = nn.Conv2d(2 * channels, channels, 3, padding=1)
        self.norm, self.second_norm = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.first(x)))
        below = F.silu(self.second_norm(self.second(F.avg_pool2d(x, 2))))
        return self.last(torch.cat((x, F.interpolate(below, scale_factor=2)), 1))


class Head(nn.Module):
    """The end of a language model: logits in bfloat16, their loss in fp32."""

    def __init__(self, width: int = 64, vocabulary: int = 1000) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(width), nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(self.norm(x).bfloat16(), self.weight.bfloat16()).float().flatten(0, 1)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


WORDS, IMAGE = (32, 64), (16, 12, 12)
