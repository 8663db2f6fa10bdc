"""What the pool's ranks do in tests of checkpoints that each rank writes its own part of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# It also makes the backend "fake" known.
from torch.testing._internal.distributed.fake_pg import FakeStore

from gradus.checkpoint.commit import commit
from gradus.checkpoint.owners import owned, part_layout
from gradus.checkpoint.part import write_part, write_record
from gradus.checkpoint.reading import read_rows
from gradus.checkpoint.snapshot import streamed
from gradus.checkpoint.store import CheckpointStore
from gradus.parallel.expert import expert_mesh
from gradus.parallel.part import local_part
from gradus.parallel.world import World
from gradus.schema.plan import Mesh

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (7, 5),
    "few": (3, 4),  # fewer than ranks
    "columns": (4, 9),
    "up": (8, 6),
    "down": (6, 8),
    "experts": (4, 6, 3),
    "number": (),
    "empty": (0, 3),
    "flags": (5,),
    "small": (6, 2),
}
DTYPES = {"flags": torch.bool, "small": torch.float8_e4m3fn, "number": torch.float64, "columns": torch.bfloat16}


def whole(name: str) -> Tensor:
    """The tensor of a name, as all ranks know it."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    drawn = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn > 0 if name == "flags" else drawn.to(DTYPES.get(name, torch.float32))


def spread(name: str, mesh: Any, *placements: Any) -> Tensor:
    return distribute_tensor(whole(name), mesh, list(placements), src_data_rank=None)


class Layers(nn.Module):
    """Two layers that tensor parallelism divides along other dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)


def layered(world: World) -> dict[str, Tensor]:
    """Divided over tensor ranks and, by FSDP2, further over shards."""
    layers = Layers()
    with torch.no_grad():
        layers.up.weight.copy_(whole("up"))
        layers.down.weight.copy_(whole("down"))
    parallelize_module(
        layers, world.submesh("tensor"), {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None
    )
    fully_shard(layers, mesh=world.flat_mesh("shard", "context"))
    return {"up": layers.up.weight, "down": layers.down.weight}


def expert_parts(mesh: Any) -> dict[str, Tensor]:
    """Experts over an expert group, and over the ranks that hold the same ones."""
    module = nn.Module()
    module.weight = nn.Parameter(spread("experts", mesh["expert"], Shard(0)))
    fully_shard(module, mesh=mesh["expert_shard"], shard_placement_fn=lambda _: Shard(1))
    assert isinstance(module.weight, Tensor)
    return {"experts": module.weight}


def held(world: World) -> dict[str, Tensor]:
    """What a rank holds of all tensors, divided as its mesh would have it."""
    mesh, place = world.mesh, world.place
    plain = {name: whole(name) for name in SHAPES}
    if mesh.tensor > 1:
        found = {**plain, **layered(world)}
        found["columns"] = spread("columns", world.submesh("tensor"), Shard(1))  # and copied over the shards
        return found
    if mesh.expert > 1:
        mesh_of_experts = expert_mesh(world)
        small = spread("small", mesh_of_experts["expert"], Shard(0))  # and copied over those with the same experts
        return {**plain, **expert_parts(mesh_of_experts), "small": small}
    if mesh.pipeline > 1:
        stages = [("rows", "up", "experts", "flags"), ("few", "columns", "down", "number", "empty", "small", "flags")]
        plain = {name: plain[name] for name in stages[place.pipeline]}
    if mesh.shard > 1:
        over = world.two_meshes(("replicate",), ("shard", "context")) if mesh.replicate > 1 else world.submesh("shard")
        copies = [Replicate()] * (mesh.replicate > 1)
        for name, dim in {"rows": 0, "few": 0, "columns": 1, "experts": 1, "down": 0, "small": 0}.items():
            if name in plain:
                plain[name] = spread(name, over, *copies, Shard(dim))
    return plain


MESHES = [
    Mesh(replicate=4),
    Mesh(shard=4),
    Mesh(replicate=2, shard=2),
    Mesh(tensor=2, shard=2),
    Mesh(pipeline=2, shard=2),
    Mesh(shard=4, expert=2),
    Mesh(shard=4, expert=4),
]


def save_part(folder: Path, step: int, tensors: dict[str, Tensor], world: World) -> None:
    """Write this rank's part, as the writer would, and on rank 0 commit."""
    path = CheckpointStore(folder).path(step)
    mine = owned(tensors, world)
    layout = part_layout(mine, world.rank, world.size)
    data = streamed(layout, mine)
    write_record(path, write_part(path, layout, data, abandoned=lambda: False, held=tuple(tensors)))
    if world.leads:
        commit(path, step, world.size, {"state": {}}, abandoned=lambda: False)
    world.barrier()


def cleared(tensor: Tensor) -> Tensor:
    local = local_part(tensor).tensor
    local.view(torch.uint8).fill_(0xFF) if local.dim() and local.numel() else local.fill_(99)
    return tensor


def is_right(name: str, tensor: Tensor) -> bool:
    """Whether what is here of a tensor is what it should be."""
    box = local_part(tensor)
    expected = whole(name)
    for dim, (offset, size) in enumerate(zip(box.offset, box.tensor.shape, strict=True)):
        expected = expected.narrow(dim, min(offset, expected.shape[dim]), size)
    return torch.equal(box.tensor.to(torch.float64), expected.to(torch.float64))


def resharded(world: World, folder: str) -> dict[str, Any]:
    """Save on each mesh, and read what was saved on each on each of them; what came back wrong."""
    worlds = [world.arranged(mesh) for mesh in MESHES]
    here = [held(at) for at in worlds]
    for step, (at, tensors) in enumerate(zip(worlds, here, strict=True)):
        save_part(Path(folder), step, tensors, at)
    wrong = []
    for step, saved_on in enumerate(MESHES):
        stored = CheckpointStore(Path(folder)).open(step, every_byte=False).stored()
        for mesh, tensors in zip(MESHES, here, strict=True):
            for name, tensor in tensors.items():
                read_rows(stored[name], cleared(tensor))
                if not is_right(name, tensor):
                    wrong.append(f"{name} saved on {saved_on}, read on {mesh}")
    placements = {type(p).__name__ for tensors in here for t in tensors.values() for p in getattr(t, "placements", ())}
    return {"wrong": wrong, "placements": placements}


def boxes_of_all(alone: World, mesh: Mesh, make: Callable[[World], dict[str, Tensor]]) -> list[dict[str, Any]]:
    """What each rank of a world of any size would write: for each tensor its whole shape, and where its box lies."""
    found = []
    for rank in range(mesh.world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world_size)
        try:
            size = mesh.world_size
            world = World(rank, rank % 8, size, CPU, mesh=Mesh(replicate=size)).arranged(mesh)
            layout = part_layout(owned(make(world), world), rank, size)
            found.append({entry.name: (entry.shape, entry.offset, entry.box) for entry in layout.entries})
        finally:
            dist.destroy_process_group()
    return found


def divided(world: World) -> dict[str, Tensor]:
    """Tensors along every combination of a mesh's dimensions, and plain ones."""
    mesh = world.mesh
    tensors: dict[str, Tensor] = {f"plain.{n}": torch.zeros(n + 1, 3) for n in range(20)}
    tensors[f"stage.{world.place.pipeline}"] = torch.zeros(4)
    flat = world.flat_mesh("shard", "context")
    two = world.two_meshes(("replicate",), ("shard", "context"))
    experts = expert_mesh(world)
    for n in range(6):
        tensors[f"tensor.{n}"] = _zeros((8, n + 1), world.submesh("tensor"), Shard(0))
        tensors[f"flat.{n}"] = _zeros((9, n + 1), flat, Shard(0))
        tensors[f"two.{n}"] = _zeros((5, n + 1), two, Replicate(), Shard(0))
        tensors[f"shard.{n}"] = _zeros((n + 1, 7), world.submesh("shard"), Shard(1))
        tensors[f"replicated.{n}"] = _zeros((n + 1, 7), two, Replicate(), Replicate())
        tensors[f"expert.{n}"] = _zeros((mesh.expert, n + 1), experts["expert"], Shard(0))
        tensors[f"both.{n}"] = _zeros((mesh.expert, 5, 2), experts["expert_shard", "expert"], Shard(1), Shard(0))
    return tensors


def _zeros(shape: tuple[int, ...], mesh: Any, *placements: Any) -> Tensor:
    return distribute_tensor(torch.zeros(shape), mesh, list(placements), src_data_rank=None)
