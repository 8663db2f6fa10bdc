"""A rank of `gradus bench collectives`: measures what it is asked to, all ranks together; rank 0 prints the rows.

`python -m gradus.bench.collectives_rank JSON`, under torchrun.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from gradus.bench.as_rank import main, say
from gradus.bench.collectives import DTYPES, table
from gradus.parallel.world import connected, store_from_environment
from gradus.training.device import rank_device


def measure(asked: Mapping[str, Any]) -> None:
    rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device("cpu") if asked["backend"] == "gloo" else rank_device(local_rank)
    with connected(rank, local_rank, size, device, store_from_environment()):
        if rank == 0:
            say(device=device.type, backend="nccl" if device.type == "cuda" else "gloo")
        for row in table(asked["operations"], asked["sizes"], DTYPES[asked["dtype"]], device):
            if rank == 0:
                say(row=row.document())


if __name__ == "__main__":
    main(measure)
