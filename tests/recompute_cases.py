"""Gradients with and without recomputation, in this process and in the pool's."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradus.models import catalogue
from gradus.models.output import LossOutput, classification_loss
from gradus.models.resnet import ResidualBlock
from gradus.parallel import host_memory
from gradus.parallel.batch_norm import muted_batch_norm
from gradus.parallel.recompute import apply_recompute
from gradus.parallel.replicate import replicated, unwrapped
from gradus.parallel.shard import shard
from gradus.parallel.world import World
from gradus.schema.plan import Mesh, Plan

GPT = {"layers": 3, "width": 16, "heads": 4, "kv_heads": 2, "context": 12, "dropout": 0.2}
Outcome = dict[str, Tensor]
everything_travels = patch.object(host_memory, "LEAST_BYTES", 0)  # to the host, however small


def text(samples: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 256, (samples, 13), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def images(samples: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (samples,), generator=generator)
    return torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64), labels


def gpt(**changes: Any) -> nn.Module:
    torch.manual_seed(1)
    return catalogue.build("gpt", {**GPT, **changes}).double()


class NarrowResNet(nn.Module):
    """The blocks of a ResNet, with few channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(ResidualBlock(3, 3, stride=1, bottleneck=False) for _ in range(3)))
        self.head = nn.Linear(3, 4)

    def forward(self, images: Tensor, labels: Tensor) -> LossOutput:
        return classification_loss(self.head(self.stages(images).mean((2, 3))), labels, self.training)


def resnet() -> nn.Module:
    torch.manual_seed(1)
    return NarrowResNet().double()


def outcome(model: nn.Module, batch: tuple[Tensor, ...]) -> Outcome:
    """Loss, gradients and buffers of two passes, the second of which adds to the gradients."""
    torch.manual_seed(5)
    result: Outcome = {}
    for _ in range(2):
        output = model(*batch)
        loss = output.loss_sum if hasattr(output, "loss_sum") else output.double().square().sum()
        loss.backward()
    result["loss"] = loss.detach()
    for name, parameter in unwrapped(model).named_parameters():
        if parameter.grad is not None:
            result[f"gradient of {name}"] = whole(parameter.grad)
    for name, buffer in unwrapped(model).named_buffers():
        result[name] = buffer.detach().clone()
    return result


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def with_plan(model: nn.Module, **plan: Any) -> nn.Module:
    changed = copy.deepcopy(model)
    apply_recompute(changed, Plan(**plan))
    return changed


@everything_travels
def on_replicas(world: World, plan: dict[str, Any]) -> Outcome:
    model = with_plan(gpt(), **plan)
    return outcome(replicated(model, world, 1, some_rank_may_pad=False), text(seed=world.rank))


def on_replicas_with_batch_norm(world: World, plan: dict[str, Any], padded: bool) -> Outcome:
    """The second rank may have only padding; backward is outside of what mutes it, as it is in a training step."""
    model = replicated(with_plan(resnet(), **plan), world, 1, some_rank_may_pad=True)
    with muted_batch_norm(model, padded and world.rank == 1):
        loss = model(*images(seed=world.rank)).loss_sum
    (loss * 0 if padded and world.rank == 1 else loss).backward()
    inner = unwrapped(model)
    gradients = {f"gradient of {name}": p.grad for name, p in inner.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, **dict(inner.named_buffers())}


@everything_travels
def on_shards(world: World, plan: dict[str, Any]) -> Outcome:
    complete = Plan(mesh=Mesh(shard=world.size), zero=3, **plan)
    arranged = world.arranged(complete.mesh)
    model = gpt()
    apply_recompute(model, complete)
    shard(model, arranged, complete, None)
    return outcome(model, text(seed=world.rank))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(x))))
        return y


@everything_travels
def on_tensor_slices(world: World, plan: dict[str, Any]) -> Outcome:
    arranged = world.arranged(Mesh(tensor=world.size))
    torch.manual_seed(1)
    model = nn.Sequential(Perceptron(), Perceptron(), Perceptron()).double()
    for block in model:
        parallelize_module(
            block,
            arranged.submesh("tensor"),
            {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()},
        )
    apply_recompute(model, Plan(**plan))
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    result = outcome(model, (x,))
    dist.barrier()
    return result
