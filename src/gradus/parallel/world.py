"""World: this rank's place among all ranks, the device it trains on, and the store through which ranks agree."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradus.parallel.layout import DIMENSIONS, Place, place_of
from gradus.schema.plan import Mesh

COLLECTIVE_TIMEOUT = timedelta(minutes=30)

# The gloo backends of worlds that this process has left. Were a DDP model the last to hold one, freeing the model would
# join gloo's threads while it holds the interpreter's lock, and one of those threads may be waiting for that lock
# (seen with torch 2.13). Freed from Python, a backend lets go of the lock first.
left_backends: list[object] = []


@dataclass(frozen=True)
class World:
    rank: int
    local_rank: int
    size: int
    device: torch.device
    store: Store | None = None  # None for a world of one
    mesh: Mesh = field(default_factory=Mesh)  # until `arranged` knows the plan's, all ranks are replicas
    device_mesh: DeviceMesh | None = None  # torch's, with the dimensions of the layout; None for a world of one

    def arranged(self, mesh: Mesh) -> World:
        """This world with its ranks in the groups of a mesh. All ranks must call it."""
        mesh.check(self.size)
        device_mesh = None
        if self.size > 1:
            sizes = tuple(getattr(mesh, name) for name in DIMENSIONS)
            device_mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=DIMENSIONS)
        return replace(self, mesh=mesh, device_mesh=device_mesh)

    @property
    def place(self) -> Place:
        return place_of(self.rank, self.mesh)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes files and looks for stop requests."""
        return self.rank == 0

    # Among whom samples are divided: ranks that share one model's work share one data rank.
    @property
    def data_rank(self) -> int:
        return self.place.replicate * self.mesh.shard + self.place.shard

    @property
    def data_ranks(self) -> int:
        return self.mesh.data_ranks

    @property
    def averaging_ranks(self) -> int:
        """Over how many ranks the gradient of a parameter is averaged: those with other samples or other tokens."""
        return self.mesh.replicate * self.mesh.shard * self.mesh.context

    @property
    def in_last_stage(self) -> bool:
        return self.place.pipeline == self.mesh.pipeline - 1

    @property
    def counts_losses(self) -> bool:
        """Whether this rank's loss enters sums over all ranks; those that compute the same one stay out."""
        return self.in_last_stage and self.place.tensor == 0

    def submesh(self, *names: str) -> DeviceMesh:
        """Of this rank's groups, those along the named dimensions."""
        assert self.device_mesh is not None, "a world of one has no groups"
        return self.device_mesh[names]

    def flat_mesh(self, *names: str) -> DeviceMesh:
        """The named dimensions as one. All ranks must ask for the same, in the same order."""
        wide = [name for name in names if getattr(self.mesh, name) > 1] or [names[-1]]
        mesh = self.submesh(*wide)
        return mesh if len(wide) == 1 else mesh._flatten("_".join(wide))

    def two_meshes(self, outer: tuple[str, ...], inner: tuple[str, ...]) -> DeviceMesh:
        """A mesh of two dimensions, each of which stands for several of the layout's."""
        names = [self.flat_mesh(*group).mesh_dim_names for group in (outer, inner)]
        assert self.device_mesh is not None
        with warnings.catch_warnings():
            # torch 2.13 wants such meshes to be put together otherwise, in a way that 2.11 does not know yet.
            warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
            return self.device_mesh[tuple(name for (name,) in names)]  # type: ignore[misc]

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """The values summed over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def alone(device: torch.device) -> World:
    return World(rank=0, local_rank=0, size=1, device=device)


@contextmanager
def connected(
    rank: int, local_rank: int, size: int, device: torch.device, store: Store, *, shares_gpu: bool = False
) -> Iterator[World]:
    """A world whose ranks can talk: NCCL between GPUs, gloo between CPUs and for tensors in host memory.

    NCCL refuses two ranks on one GPU: where ranks share one, gloo does everything.
    """
    if size == 1:
        yield alone(device)
        return
    over_nccl = device.type == "cuda" and not shares_gpu
    backend = "cpu:gloo,cuda:nccl" if over_nccl else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore("collectives", store),
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if over_nccl else None,
    )
    try:
        yield World(rank, local_rank, size, device, PrefixStore("gradus", store), Mesh(replicate=size))
    finally:
        # Those of the groups of a mesh as well, which only torch's own table knows: DDP may be over one of them.
        for group in dist.distributed_c10d._world.pg_map:
            with suppress(RuntimeError):  # one that has none for the host
                left_backends.append(group._get_backend(torch.device("cpu")))
        dist.destroy_process_group()


def store_from_environment() -> Store:
    """The store of the rendezvous that torchrun, or anything that sets its variables, has prepared."""
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=os.environ["RANK"] == "0" and not agent_hosts,
        timeout=COLLECTIVE_TIMEOUT,
    )
