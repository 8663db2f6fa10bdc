"""World: this rank's place among all ranks, the device it trains on, and the store through which ranks agree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

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

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes files and looks for stop requests."""
        return self.rank == 0

    # Among whom samples are divided. Today everyone; ranks that share one model's work will share one data rank.
    @property
    def data_rank(self) -> int:
        return self.rank

    @property
    def data_ranks(self) -> int:
        return self.size

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
def connected(rank: int, local_rank: int, size: int, device: torch.device, store: Store) -> Iterator[World]:
    """A world whose ranks can talk: NCCL between GPUs, gloo between CPUs and for tensors in host memory."""
    if size == 1:
        yield alone(device)
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore("collectives", store),
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield World(rank, local_rank, size, device, PrefixStore("gradus", store))
    finally:
        left_backends.append(dist.group.WORLD._get_backend(torch.device("cpu")))  # type: ignore[union-attr]
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
