"""expert: the experts of a mixture spread over ranks, and their tokens sent to them and back (all-to-all).

Neighbours inside shard × context form an expert group: each has experts / ways of the experts, and tokens of its own.
Every rank sends each token to the ranks that hold its experts, computes what arrives, and sends the results back.

    before   rank 0: tokens a b c               rank 1: tokens d e f
    sent     a c d  → experts 0 to 3            b e f → experts 4 to 7
    after    rank 0: tokens a b c               rank 1: tokens d e f

The stacked weights become DTensors, divided along the experts; the ranks of shard × context that hold the same experts
divide them further (`shard_experts`). `parallel` knows no model: a mixture is any module that has `experts` and lets
itself be told how to reach them (`spread`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from gradus.parallel.batch_norm import sum_over_ranks
from gradus.parallel.world import World
from gradus.schema.errors import InputError

MESH_DIMENSIONS = ("replicate", "pipeline", "expert_shard", "expert", "tensor")
TOKENS_APART = ("replicate", "shard", "context")  # along these dimensions, ranks have tokens of their own


def apply_experts(model: nn.Module, world: World) -> None:
    """Let the mixtures of the model, in place, count over all ranks, and spread their experts where the mesh says so.

    The model may be on the meta device, and is whole: a pipeline is cut after this. All ranks must call it.
    """
    mixtures = mixtures_of(model)
    if world.size == 1 or (not mixtures and world.mesh.expert == 1):
        return
    if world.averaging_ranks > 1:
        group = world.flat_mesh(*TOKENS_APART).get_group()
        for mixture in mixtures:
            mixture.sum_over_ranks = partial(sum_over_ranks, group=group)
    if world.mesh.expert == 1:
        return
    if not mixtures:
        raise _nothing_to_spread(model, world.mesh.expert)
    spread = Spread(expert_mesh(world))
    for mixture in mixtures:
        _divide(mixture.experts, spread)
        mixture.spread = spread


def mixtures_of(model: nn.Module) -> list[Any]:
    """Its mixtures of experts, known by what they have."""
    return [module for module in model.modules() if hasattr(module, "spread") and hasattr(module, "experts")]


def expert_mesh(world: World) -> DeviceMesh:
    """The ranks of shard × context once more, as groups that share all experts and groups that hold the same."""
    mesh = world.mesh
    rest = mesh.shard * mesh.context // mesh.expert
    sizes = (mesh.replicate, mesh.pipeline, rest, mesh.expert, mesh.tensor)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=MESH_DIMENSIONS)


def shard_experts(model: nn.Module, world: World, *, reshard_after_forward: bool, **options: Any) -> None:
    """Divide experts that are spread already over the ranks that hold the same ones. Before the blocks around them.

    Where no two ranks hold the same, nothing is divided further, and yet parameters and gradients are treated alike.
    """
    for mixture in mixtures_of(model):
        if not isinstance(mixture.spread, Spread):
            continue
        root, replicated = mixture.spread.mesh, world.mesh.replicate > 1
        mesh = root["replicate", "expert_shard"] if replicated else root["expert_shard"]
        fully_shard(
            mixture.experts,
            **{**options, "mesh": mesh},
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=partial(_dimension_to_shard, ways=root["expert_shard"].size()),
        )


@dataclass(frozen=True)
class Spread:
    """Sends the tokens of an expert group to their experts and back. No token is dropped on the way."""

    mesh: DeviceMesh  # of `expert_mesh`

    def local(self, stacked: Tensor) -> Tensor:
        """The weights of this rank's experts, whose gradient is to be averaged over all ranks that have tokens.

        It is the sum over the tokens of the expert group already. What averages it over the other ranks (FSDP2) knows
        nothing of these, so they are divided by here.
        """
        assert isinstance(stacked, DTensor)
        y: Tensor = _DividedGradient.apply(stacked.to_local(), self.mesh["expert"].size())  # type: ignore[no-untyped-call]
        return y

    def __call__(self, experts: nn.Module, x_md: Tensor, counts_e: Tensor) -> Tensor:
        """Rows sorted by expert, so many for each, through the experts wherever they are."""
        group = self.mesh.get_group("expert")
        leaving_re = counts_e.view(group.size(), -1)
        arriving_re = torch.empty_like(leaving_re)
        dist.all_to_all_single(arriving_re, leaving_re, group=group)
        # How much memory to make for what arrives is for the host to know: here it waits for the device.
        sent, received = torch.stack((leaving_re.sum(1), arriving_re.sum(1))).tolist()
        arrived_md = _exchanged(x_md, received, sent, group)
        # They come rank by rank, and of each rank by expert; wanted is by expert only.
        numbers_re = torch.arange(arriving_re.shape[1], device=x_md.device).expand_as(arriving_re)
        expert_m = numbers_re.flatten().repeat_interleave(arriving_re.flatten(), output_size=sum(received))
        order_m = expert_m.argsort(stable=True)
        done_md = experts(arrived_md.index_select(0, order_m), arriving_re.sum(0))
        returning_md = torch.empty_like(done_md).index_copy(0, order_m, done_md)
        return _exchanged(returning_md, sent, received, group)


class _DividedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.divisor, None


class _Exchange(torch.autograd.Function):
    """All-to-all of rows. Its gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x_md: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        return _sent(x_md, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        received, sent = ctx.sizes
        return _sent(grads[0], sent, received, ctx.group), None, None, None


def _sent(x_md: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    y_md = x_md.new_empty(sum(received), *x_md.shape[1:])
    dist.all_to_all_single(y_md, x_md.contiguous(), received, sent, group=group)
    return y_md


def _exchanged(x_md: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    y_md: Tensor = _Exchange.apply(x_md, received, sent, group)  # type: ignore[no-untyped-call]
    return y_md


class ExpertLoads:
    """What the experts had to do in a step, over all ranks. All ranks must make one, and use it alike."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._mixtures = mixtures_of(model)
        self._tokens_apart = self._stages = None
        anywhere = torch.tensor([len(self._mixtures)], device=world.device)
        if world.mesh.pipeline > 1:
            self._stages = world.submesh("pipeline").get_group()
            dist.all_reduce(anywhere, group=self._stages)
        self._exist = bool(anywhere.item())
        if self._exist and world.averaging_ranks > 1:
            self._tokens_apart = world.flat_mesh(*TOKENS_APART).get_group()
        self._device = world.device

    @torch.no_grad()
    def settle(self) -> dict[str, Tensor]:
        """After an optimizer step: balance the experts by what it showed, and return its numbers, on the device.

        They are the load of the busiest expert over the mean, as a mean over layers, and the share of choices that
        were dropped because an expert was full.
        """
        if not self._exist:
            return {}
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        if self._mixtures:
            loads = torch.stack([mixture.load for mixture in self._mixtures])
            if self._tokens_apart is not None:
                dist.all_reduce(loads, group=self._tokens_apart)
            for mixture, load in zip(self._mixtures, loads, strict=True):
                mixture.settle(load)
            wanted, dropped = loads[:, :-1].double(), loads[:, -1].double()
            ratios = wanted.amax(1) / wanted.mean(1)
            sums = torch.stack((ratios.sum(), torch.ones_like(ratios).sum(), dropped.sum(), wanted.sum()))
        if self._stages is not None:
            dist.all_reduce(sums, group=self._stages)
        return {"expert_load_max_over_mean": sums[0] / sums[1], "tokens_dropped": sums[2] / sums[3]}

    @contextmanager
    def counting(self, samples: int | None) -> Iterator[None]:
        """Inside, choices are counted: those for the first `samples` of a batch, the rest is padding. None: not any."""
        for mixture in self._mixtures:
            mixture.counting, mixture.real_samples = samples is not None, samples
        try:
            yield
        finally:
            for mixture in self._mixtures:
                mixture.counting, mixture.real_samples = False, None


def _dimension_to_shard(parameter: nn.Parameter, ways: int) -> Shard:
    """Not the first if it can be: a rank often has too few experts to divide them once more."""
    return Shard(1 if parameter.shape[1] % ways == 0 else 0)


def _divide(experts: nn.Module, spread: Spread) -> None:
    """Each stacked weight as a DTensor of which this rank keeps its experts."""
    mesh = spread.mesh["expert"]
    ways, number = mesh.size(), mesh.get_local_rank()
    for name, parameter in list(experts.named_parameters(recurse=False)):
        if len(parameter) % ways:
            raise _uneven(len(parameter), ways)
        mine = parameter.detach().chunk(ways)[number].clone()
        divided = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
    setattr(experts, "local", spread.local)  # noqa: B010  (for mypy, modules hold tensors)


def _uneven(experts: int, ways: int) -> InputError:
    return InputError(
        f"plan.mesh.expert: found {ways}, but the model has {experts} experts, which {ways} ranks cannot share evenly",
        field="plan.mesh.expert",
        found=ways,
        allowed=f"a divisor of {experts}",
    )


def _nothing_to_spread(model: nn.Module, ways: int) -> InputError:
    return InputError(
        f"plan.mesh.expert: found {ways}, but {type(model).__name__} has no experts to spread",
        hint="use plan.mesh.expert=1; gpt is a mixture with model.experts",
        field="plan.mesh.expert",
        found=ways,
        allowed=1,
    )
