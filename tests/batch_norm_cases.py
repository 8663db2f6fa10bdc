"""What the pool's processes do in tests of batch normalisation over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradus.parallel.batch_norm import SharedBatchNorm, muted_batch_norm, share_batch_norm
from gradus.parallel.replicate import replicated
from gradus.parallel.world import World
from gradus.schema.errors import InputError

CHANNELS = 3
STEPS = 3


class BatchNormAct(nn.BatchNorm2d):
    """As in timm: normalisation and activation in one."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def layer(dims: int, has_bias: bool = True, **options: Any) -> nn.Module:
    """A plain layer whose weights are not the trivial ones."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[dims]
    plain: nn.Module = kind(CHANNELS, **options).double()
    if not has_bias:
        plain.bias = None  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(1)
    for parameter in plain.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return plain


def joined(dims: int, samples: int, step: int) -> tuple[Tensor, Tensor]:
    """The input of all ranks together, far from zero mean, and the gradient that comes back to it."""
    shape = (samples, CHANNELS, *(5, 4)[: dims - 2])
    generator = torch.Generator().manual_seed(10 + step)
    x = 3 + 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(shape, generator=generator, dtype=torch.float64)


def results(model: nn.Module, x: Tensor, back: Tensor, weight: float = 1.0) -> dict[str, Tensor]:
    """Output, input gradient and parameter gradients of one step."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * back * weight).sum().backward()
    found = {"output": y.detach(), "input": x.grad}
    return found | {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def shared_by_ranks(
    world: World, dims: int, sizes: list[int], options: dict[str, Any], muted_rank: int | None = None, bias: bool = True
) -> dict[str, Any]:
    """Each rank has its slice of the joined batch; a muted one has a sample of its own that must not count."""
    model = nn.Sequential(layer(dims, bias, **options))
    share_batch_norm(model, world.device, some_rank_may_pad=muted_rank is not None)
    assert isinstance(model[0], SharedBatchNorm)
    first = sum(sizes[: world.rank])
    muted = world.rank == muted_rank
    steps = []
    for step in range(STEPS):
        x, back = joined(dims, sum(sizes), step)
        mine = slice(first, first + sizes[world.rank])
        if muted:
            x, back, mine = torch.full_like(x[:1], 1e3), torch.ones_like(back[:1]), slice(0, 1)
        with muted_batch_norm(model, muted):
            steps.append(results(model, x[mine], back[mine], weight=0.0 if muted else 1.0))
    model.eval()
    x, back = joined(dims, 4, 99)
    return {"steps": steps, "state": state(model), "evaluated": results(model, x, back)}


def one_value_per_channel(world: World, sizes: list[int]) -> str:
    """What happens when all ranks together have a single value."""
    model = nn.Sequential(layer(2))
    share_batch_norm(model, world.device, some_rank_may_pad=True)
    before = state(model)
    muted = sizes[world.rank] == 0
    try:
        with muted_batch_norm(model, muted):
            model(torch.ones(max(1, sizes[world.rank]), CHANNELS, dtype=torch.float64))
    except ValueError as error:
        assert all(torch.equal(value, before[name]) for name, value in state(model).items())
        return str(error)
    return "no error"


def refusal(world: World) -> tuple[str, str | None]:
    """What a model is told whose BatchNorm has a forward of its own."""
    world.barrier()  # without it one rank could leave while the other still connects
    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"act": BatchNormAct(3)}))
    try:
        replicated(model, world, 25, some_rank_may_pad=False)
    except InputError as error:
        return str(error), error.hint
    return "no error", None
