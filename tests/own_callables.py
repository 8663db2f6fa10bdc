"""Every kind of callable that a recipe may name, as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from user_code import Points

HERE = __file__


class Zoo:
    @classmethod
    def line(cls, bias: bool = True) -> nn.Module:
        return nn.Linear(4, 1, bias=bias)


class Nested(nn.Module):
    """Takes a dict in a dict, and returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.linear(inputs["x"] * inputs["scale"][:, None]) - target).square().mean()}


def absolute_error(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[-1]).abs().mean()


def weighted_error(output: Tensor, batch: Any, power: float = 2.0) -> tuple[Tensor, Tensor]:
    """Samples with a negative target do not count."""
    target = batch["y"] if isinstance(batch, dict) else batch[-1]
    valid = (target > 0).to(output.dtype)
    return ((output - target).abs() ** power * valid).sum(), valid.sum()


class Huber(nn.Module):
    def __init__(self, delta: float) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.huber_loss(output, batch[-1], delta=self.delta)


def within(output: Tensor, batch: Any, distance: float) -> tuple[Tensor, int]:
    near = (output - batch[-1]).abs() < distance
    return near.sum(), near.numel()


def half_way_down(progress: float) -> float:
    return 1.0 if progress < 0.5 else 0.1


class SignDescent(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, shrink: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "shrink": shrink})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(group["shrink"]).sub_(parameter.grad.sign(), alpha=group["lr"])


class Named(Points):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"input": x, "y": y, "name": f"sample {index}"}


class InDicts(Points):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"inputs": {"x": x, "scale": 2.0}, "target": y}


class OfTexts(Dataset[Any]):
    """Samples that only its own `collate` can put together."""

    def __init__(self, samples: int = 64) -> None:
        self.points = Points(samples)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        x, y = self.points[index]
        return (" ".join(f"{value:.6f}" for value in x.tolist()), y)

    def collate(self, items: list[Any]) -> Any:
        texts, targets = zip(*items, strict=True)
        return torch.tensor([[float(word) for word in text.split()] for text in texts]), torch.stack(targets)
