"""What the pool's processes do in tests of replicas."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from gradus.parallel.replicate import (
    check_every_parameter_is_used,
    explain_ddp_error,
    reducing_gradients,
    replicated,
    share_buffers,
    unwrapped,
)
from gradus.parallel.world import World
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh

STEPS = 6


class WithBuffers(nn.Module):
    """Weights and buffers that differ from rank to rank, because the constructor is not deterministic."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.linear = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.fill_(rank)  # type: ignore[union-attr]
        self.register_buffer("average", torch.full((3,), float(rank)))
        self.register_buffer("seen", torch.tensor(rank), persistent=False)
        self.register_buffer("short", torch.full((2,), rank, dtype=torch.int16))
        self.register_buffer("mask", torch.tensor([rank == 0, True]))
        self.register_buffer("angles", torch.full((2,), 1j * rank))
        self.register_buffer("expanded", torch.full((2,), float(rank)).expand(3, 2))
        self.register_buffer("transposed", torch.arange(6.0).add(rank).view(2, 3).t())
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = 0.5 * self.average + 0.5 * x.detach().mean(0)  # another tensor in the buffer's place
            self.seen += len(x)
        y: Tensor = self.norm(self.frozen(self.linear(x)))
        return y


class PartlyUsed(nn.Module):
    def __init__(self, unused: int, *, except_in: frozenset[int] = frozenset()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(3, 3)
        self.unused = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(unused)])
        self.after = nn.Linear(3, 1)
        self.except_in = except_in
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in self.except_in:
            x = x + sum(self.unused)
        y: Tensor = self.after(self.used(x))
        return y


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def step(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    model.zero_grad()


def start_and_train(world: World) -> dict[str, Any]:
    """The state at the start, after some steps on the rank's own samples, and after sharing buffers."""
    model = WithBuffers(world.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = replicated(model, world, 25, some_rank_may_pad=False)
    start = tensors(unwrapped(wrapped))
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(STEPS):
        step(wrapped, torch.randn(4 + world.rank, 3, generator=generator))
    trained = tensors(model)
    share_buffers(model, world)
    return {
        "start": start,
        "trained": trained,
        "shared": tensors(model),
        "warnings": [str(warning.message) for warning in caught],
    }


def collectives_of_sharing(world: World) -> int:
    """How many broadcasts a model takes whose only buffers are batch statistics."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    wrapped = replicated(model, world, 25, some_rank_may_pad=False)
    sent: list[Tensor] = []
    original = torch.distributed.broadcast
    torch.distributed.broadcast = lambda tensor, **_: sent.append(tensor)  # type: ignore[assignment]
    try:
        share_buffers(unwrapped(wrapped), world)
    finally:
        torch.distributed.broadcast = original
    return len(sent)


def train_with_unused(world: World, unused: int) -> dict[str, Any]:
    """What the check says after the first backward, and what is made of DDP's error at the next forward."""
    wrapped = replicated(PartlyUsed(unused), world, 25, some_rank_may_pad=False)
    wrapped(torch.ones(2, 3)).sum().backward()
    try:
        check_every_parameter_is_used(wrapped)
        checked: InputError | None = None
    except InputError as error:
        checked = error
    wrapped.zero_grad(set_to_none=True)
    return {"checked": _said(checked), "explained": _said(_error_of_next_forward(wrapped))}


def unused_in_the_last_micro_batch(world: World) -> dict[str, Any]:
    """All parameters have gradients from the first micro-batch, but DDP waits for those of the last."""
    wrapped = replicated(PartlyUsed(2, except_in=frozenset({1})), world, 25, some_rank_may_pad=False)
    for index in range(2):
        with reducing_gradients(wrapped, reduce=index == 1):
            wrapped(torch.ones(2, 3)).sum().backward()
    check_every_parameter_is_used(wrapped)
    return {"explained": _said(_error_of_next_forward(wrapped))}


def _error_of_next_forward(wrapped: nn.Module) -> Exception | None:
    try:
        wrapped(torch.ones(2, 3)).sum().backward()
    except RuntimeError as error:
        return explain_ddp_error(error, wrapped)
    return None


def _said(error: Exception | None) -> Any:
    return (type(error).__name__, str(error), getattr(error, "hint", None))


class Normed(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.full((1,), value))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x) + self.linear(x)
        return y


def replicas_beside_stages(world: World, mesh: Mesh) -> dict[str, Any]:
    """What a rank has after one backward, on a mesh on which not all ranks are replicas of each other."""
    world = world.arranged(mesh)
    model = Normed(float(world.rank + 1))
    wrapped = replicated(model, world, 25, compression="bf16", some_rank_may_pad=False)
    start = tensors(model)
    x = torch.arange(4.0).view(2, 2) + 10 * world.rank
    wrapped(x).sum().backward()
    model.get_buffer("seen").fill_(world.rank)
    share_buffers(model, world)
    return {
        "start": start,
        "mean": model.norm.running_mean,
        "seen": model.get_buffer("seen"),
        "x": x,
        **gradients(model),
    }


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
