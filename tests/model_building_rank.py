"""One rank, in a process of its own, that builds a large model in parts and tells how much memory that took.

python model_building_rank.py LAYERS WIDTH RANK RANKS STORE
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from weight_loading_rank import peak_bytes

from gradus.parallel.part import local_part
from gradus.parallel.world import connected
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe
from gradus.training.described import described_model
from gradus.training.precision import numbers_for
from gradus.training.preparation import prepared


def main() -> None:
    layers, width, rank, ranks, store = sys.argv[1:]
    torch.set_num_threads(1)
    device = torch.device("cpu")
    model = {"use": "gpt", "layers": int(layers), "width": int(width), "heads": 8, "context": 64, "vocabulary": 256}
    recipe = Recipe.from_document(
        {"name": "large", "model": model, "data": {"use": "synthetic-tokens"}, "batch": 4, "steps": 1}
        | {"optimizer": {"use": "adamw", "lr": 0.1}}
    )
    plan = Plan(mesh=Mesh(shard=int(ranks)), zero=3 if int(ranks) > 1 else 0)
    shared = dist.FileStore(store, int(ranks))
    with connected(int(rank), int(rank), int(ranks), device, shared) as world:
        world = world.arranged(plan.mesh)
        world.barrier()
        before = peak_bytes()
        described = described_model(recipe, world, torch.float32, divided=True)
        part = prepared(described.model, recipe, plan, world, numbers_for("fp32", device), some_rank_may_pad=False)
        described.fill(part, world)
        peak = peak_bytes()
        held = sum(local_part(p).tensor.numel() * 4 for p in part.parameters())
        whole = sum(p.numel() * 4 for p in part.parameters())
        first = local_part(next(p for n, p in part.named_parameters() if n.endswith("qkv.weight"))).tensor
        deviation = first.std().item()
        numbers = {"before": before, "peak": peak, "held": held, "whole": whole, "deviation": deviation}
        print(json.dumps(numbers), flush=True)
        world.barrier()


if __name__ == "__main__":
    main()
