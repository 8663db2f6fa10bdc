"""One rank, in a process of its own, that loads a large file of weights and tells how much memory that took.

python weight_loading_rank.py FILE LAYERS WIDTH RANK RANKS STORE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradus.parallel.part import local_part
from gradus.training.pretrained import load_pretrained


def built(layers: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def expected(layer: int, row: int) -> float:
    return float(layer * 100_000 + row)


def main() -> None:
    file, layers, width, rank, ranks, store = sys.argv[1:]
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = built(int(layers), int(width))
    if int(ranks) > 1:
        dist.init_process_group("gloo", rank=int(rank), world_size=int(ranks), store=dist.FileStore(store, int(ranks)))
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer)
        fully_shard(model)
    model.to_empty(device="cpu")
    before = peak_bytes()
    load_pretrained(model, Path(file))
    peak = peak_bytes()
    held, wrong = 0, 0
    for number, parameter in enumerate(model.parameters()):
        part = local_part(parameter)
        held += part.tensor.numel() * part.tensor.element_size()
        for row in (0, part.tensor.shape[0] - 1):
            wrong += int((part.tensor[row] != expected(number, part.offset[0] + row)).any())
    print(json.dumps({"before": before, "peak": peak, "held": held, "wrong": wrong}), flush=True)
    if int(ranks) > 1:
        dist.barrier()
        dist.destroy_process_group()


def peak_bytes() -> int:
    """The most host memory that this process ever had, all of torch included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
