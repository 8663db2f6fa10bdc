"""What the pool's ranks do to load weights into a model that is cut up among them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gradus.models.gpt import GPT
from gradus.models.settings import GPTSettings
from gradus.parallel.world import World
from gradus.training.pretrained import load_pretrained

ODD = (7, 5)  # rows and columns that no number of ranks divides


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(ODD))
        self.vector = nn.Parameter(torch.zeros(3))  # fewer rows than ranks: some hold none


def sharded(world: World, file: str, settings: GPTSettings | None) -> dict[str, torch.Tensor]:
    """The whole tensors of a model that was filled shard by shard."""
    torch.manual_seed(world.rank)
    with torch.device("meta"):
        model: nn.Module = GPT(settings) if settings else Odd()
    mesh = init_device_mesh("cpu", (world.size,))
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    load_pretrained(model, Path(file))
    return {name: p.full_tensor().detach() for name, p in model.named_parameters() if isinstance(p, DTensor)}


def sharded_along(world: World, file: str, dims: tuple[int, int]) -> torch.Tensor:
    """A matrix on a 2 x 2 mesh; for each dimension of the mesh, the dimension it is cut along, or -1 for copies."""
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Replicate() if dim < 0 else Shard(dim) for dim in dims]
    model = Odd()
    model.matrix = nn.Parameter(distribute_tensor(torch.zeros(ODD), mesh, placements))
    load_pretrained(model, Path(file))
    assert isinstance(model.matrix, DTensor)
    return model.matrix.full_tensor().detach()
