"""Models and data for trials that go wrong in known ways."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A few numbers and their class; each row may take a while to come."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.seconds)
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": (x.sum() > 0).long()}


def rows(split: str, seconds: float = 0.0) -> Rows | None:
    return Rows(seconds) if split == "train" else None


class Net(nn.Module):
    """`hungry`: this rank holds so many MiB for each sample. `fails`, `stalls`: at the third step."""

    def __init__(
        self, hungry: float = 0.0, hungry_rank: int | None = None, fails: str = "", stalls: bool = False
    ) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 2)
        mine = hungry_rank is None or int(os.environ.get("RANK", "0")) == hungry_rank
        self.hungry, self.fails, self.stalls, self.calls = hungry if mine else 0.0, fails, stalls, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        print("a line that is no answer")
        if self.calls == 3 and self.fails:
            raise ValueError(self.fails)
        if self.calls == 3 and self.stalls:
            time.sleep(600)
        hidden = self.one(x).relu()
        if self.hungry:
            wide = hidden.mean(1, keepdim=True) * torch.ones(len(x), round(self.hungry * 2**18))
            hidden = hidden + 1e-9 * (wide * wide).mean(1, keepdim=True)  # both are kept for backward
        return nn.functional.cross_entropy(self.two(hidden), y)


def recipe_document(batch: int = 8, **model: Any) -> dict[str, Any]:
    data = model.pop("data", {})
    return {
        "name": "tried",
        "model": {"use": "tried_models:Net", **model},
        "data": {"use": "tried_models:rows", **data},
        "batch": batch,
        "steps": 50,
        "optimizer": {"use": "sgd", "lr": 0.1},
    }
