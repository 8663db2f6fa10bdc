"""A rank of `gradus bench collectives`: measures what it is asked to, all ranks together; rank 0 prints the rows.

`python -m gradus.bench.collectives_rank JSON`, under torchrun.
"""

from __future__ import annotations

import json
import os
import sys

from gradus.bench.collectives import DTYPES, table
from gradus.parallel.world import connected, store_from_environment
from gradus.training.device import rank_device

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = rank_device(local_rank)
    with connected(rank, local_rank, size, device, store_from_environment()):
        if rank == 0:
            backend = "nccl" if device.type == "cuda" else "gloo"
            print(json.dumps({"device": device.type, "backend": backend}), flush=True)
        for row in table(asked["operations"], asked["sizes"], DTYPES[asked["dtype"]], device):
            if rank == 0:
                print(json.dumps({"row": row.document()}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # without tearing torch down, whose threads now and then abort
