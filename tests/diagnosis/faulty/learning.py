"""A model and data that can be made to learn badly, or to die while they learn."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn


class Noisy:
    """A rule of which the labels tell little; the few samples of training are learned by heart."""

    def __init__(self, length: int = 32, width: int = 32, noise: float = 1.0, split: str = "train") -> None:
        held_out = split == "validation"
        generator = torch.Generator().manual_seed(99 if held_out else 0)
        self.x = torch.randn(64 if held_out else length, width, generator=generator)
        self.y = self.x[:, :1] + noise * torch.randn(len(self.x), 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Learner(nn.Module):
    """A step takes some time, so that nothing else counts beside it on a busy machine."""

    def __init__(
        self, hidden: int = 32, seconds: float = 0.04, dies: str | None = None, at: int = 3, on_rank: int = 0
    ) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = nn.Sequential(nn.Linear(32, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.dies = dies if on_rank == int(os.environ.get("RANK", "0")) else None
        self.at, self.steps = at, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            time.sleep(self.seconds)
        if self.training and self.steps == self.at:
            if self.dies == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if self.dies == "hang":
                time.sleep(600)
            if self.dies == "nan":
                x = x * float("nan")
        return self.layers(x)
