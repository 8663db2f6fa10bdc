"""Models that compute some of it in fp32, whatever autocast does, and a dataset for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

HERE = __file__


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, x.sum(0, keepdim=True)


def points(split: str) -> Points | None:
    return Points() if split == "train" else None


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 1)
        self.formats: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.formats.append(self.head.weight.dtype)
        return self.read(self.body(x).relu())

    def read(self, h: Tensor) -> Tensor:
        return self.head(h)


class WideHead(Plain):
    def read(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):
            return self.head(h.float())


class WideHeadOnCuda(Plain):
    """Named as most people do it."""

    def read(self, h: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return self.head(h.float())


class CarefulHead(Plain):
    """The same, whatever format its weights have."""

    def read(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):
            return F.linear(h.float(), self.head.weight.float(), self.head.bias.float())


class WideGate(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def read(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):
            shares = torch.softmax(self.gate(h.float()), -1)
        return self.head(sum(shares[:, n : n + 1] * expert(h) for n, expert in enumerate(self.experts)))


class WideNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def read(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):
            return self.head(self.norm(h.float()).to(self.head.weight.dtype))


class MaskToken(Plain):
    """A norm gives fp32 under autocast; what is put into it has to be that as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.token = nn.LayerNorm(32), nn.Parameter(torch.zeros(32))

    def read(self, h: Tensor) -> Tensor:
        h = self.norm(h).clone()
        h[torch.arange(len(h)) % 2 == 0] = self.token
        return self.head(h)


class Refusing(Plain):
    def read(self, h: Tensor) -> Tensor:
        if self.head.weight.dtype != torch.float32:
            raise RuntimeError("expected scalar type Float but found BFloat16")
        return self.head(h)


class Asserting(Plain):
    def read(self, h: Tensor) -> Tensor:
        assert self.head.weight.dtype == torch.float32, "weights of 32 bits"
        return self.head(h)


class Wrong(Plain):
    def read(self, h: Tensor) -> Tensor:
        return self.head(h[:, :-1])


class Unseen(Plain):
    """Refuses where there are numbers, which a trace has not; draws random ones first, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def read(self, h: Tensor) -> Tensor:
        self.calls += 1
        h = F.dropout(h, 0.5)
        if self.head.weight.dtype != torch.float32 and type(h) is Tensor:
            raise NotImplementedError('"cdist" not implemented for BFloat16')
        return self.head(h)


def document(name: str, **more: Any) -> dict[str, Any]:
    """A recipe of one of them."""
    return {
        "name": "formats",
        "model": {"use": f"{HERE}:{name}"},
        "data": {"use": f"{HERE}:points"},
        "loss": "mse",
        "batch": 8,
        "steps": 4,
        "optimizer": {"use": "adamw", "lr": 0.01},
        **more,
    }
