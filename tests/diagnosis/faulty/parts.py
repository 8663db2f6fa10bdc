"""Models and datasets of the planted faults. What takes time sleeps, so that a busy machine changes little."""

from __future__ import annotations

import itertools
import os
import time

import torch
from torch import Tensor, nn

import gradus


class Samples:
    """Points that take `seconds` each to load; `only_on` is the one rank on which they do."""

    def __init__(self, length: int = 512, width: int = 64, seconds: float = 0.0, only_on: int | None = None) -> None:
        self.length, self.width = length, width
        here = only_on is None or only_on == int(os.environ.get("RANK", "0"))
        self.seconds = seconds if here else 0.0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.seconds:
            time.sleep(self.seconds)
        x = torch.full((self.width,), index / self.length)
        return x, x[:1]


class Dawdles(gradus.Hook):
    """Takes its time after each step."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def on_step(self, run: object) -> None:
        time.sleep(self.seconds)


class Waits(torch.autograd.Function):
    """Computing that takes so long forward, and so long backward."""

    @staticmethod
    def forward(context, x: Tensor, seconds: float, slower_back: float) -> Tensor:
        context.seconds = seconds * slower_back
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(context.seconds)
        return gradient, None, None


class Block(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: Tensor) -> Tensor:
        return Waits.apply(torch.relu(self.layer(x)), self.seconds, 1.0)


class Perceptron(nn.Module):
    """Blocks that take `seconds` each; on rank `slow_rank` so many times as long."""

    def __init__(
        self,
        width: int = 64,
        hidden: int = 64,
        blocks: int = 4,
        seconds: float = 0.004,
        slow_rank: int | None = None,
        slower: float = 4.0,
    ) -> None:
        super().__init__()
        if slow_rank is not None and int(os.environ.get("RANK", "0")) == slow_rank:
            seconds *= slower
        self.head = nn.Linear(width, hidden)
        self.blocks = nn.ModuleList([Block(hidden, seconds) for _ in range(blocks)])
        self.tail = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


class Table(nn.Module):
    """Much to learn, and little to compute: a large table of which a step reads a few rows."""

    def __init__(self, width: int = 64, rows: int = 400, seconds: float = 0.03) -> None:
        super().__init__()
        self.rows, self.block = nn.Embedding(rows, width), Block(width, seconds)
        self.tail = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.block(self.rows((x[:, 0] * 100).long())))


class Matrices(nn.Module):
    """Real matrix products, for which the threads of a CPU matter."""

    def __init__(self, width: int = 64, hidden: int = 1024, layers: int = 6) -> None:
        super().__init__()
        sizes = [width, *[hidden] * layers, 1]
        pairs = itertools.pairwise(sizes)
        self.layers = nn.Sequential(*[part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())][:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
