"""A model and a dataset as people bring them: plain PyTorch, nothing of gradus in it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.layers(points)
        return logits


class TwoSpirals(Dataset[tuple[Tensor, Tensor]]):
    """Points on two arms of a spiral; the target says which arm."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.arm = torch.arange(samples) % 2
        turns = torch.rand(samples, generator=generator) * 0.8 + 0.2
        angle = turns * 2 * torch.pi + self.arm * torch.pi
        noise = torch.randn(samples, 2, generator=generator) * 0.02
        self.points = torch.stack([turns * angle.cos(), turns * angle.sin()], dim=1) + noise

    def __len__(self) -> int:
        return len(self.arm)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.arm[index]
