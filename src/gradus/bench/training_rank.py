"""A rank that trains for a benchmark: warms up, then times iterations of several batches each, and says every one.

`python -m gradus.bench.training_rank JSON`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradus.bench.as_rank import main, say, world_of_rank
from gradus.bench.work import RecipeWork, SyntheticWork, Work
from gradus.parallel.world import World
from gradus.schema.recipe import Recipe


def train(asked: Mapping[str, Any]) -> None:
    with world_of_rank(int(asked.get("ranks_per_gpu", 1))) as world:
        work = _work(asked, world)
        if world.leads:
            say(
                device=world.device.type,
                name=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None,
                ranks=world.size,
                unit=work.unit,
                tokens=work.tokens,
                samples=work.samples,
                parameters=work.parameters,
                flops_per_sample=work.flops_per_sample,
            )
        _timed(work, int(asked["warm_up"]), world)
        if world.leads:
            say(stage="warm")
        for number in range(int(asked["iterations"])):
            world.barrier()  # replicas that are not tied to each other begin together
            seconds = _gathered(_timed(work, int(asked["batches"]), world), world)
            if world.leads:
                say(iteration=number, seconds=seconds[0], all_seconds=seconds)
        if world.leads:
            peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else None
            say(memory_peak_bytes=peak)
        world.barrier()


def _work(asked: Mapping[str, Any], world: World) -> Work:
    if asked.get("recipe") is None:
        return SyntheticWork(asked, world)
    return RecipeWork(Recipe.from_document(asked["recipe"]), world.device, Path(asked["folder"]))


def _timed(work: Work, steps: int, world: World) -> float:
    begun = time.perf_counter()
    for _ in range(steps):
        work.step()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - begun


def _gathered(seconds: float, world: World) -> list[float]:
    """Of all ranks, in host memory."""
    mine = torch.tensor([seconds], dtype=torch.float64)
    if world.size == 1:
        return mine.tolist()
    everybodys = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everybodys, mine)
    return [float(one) for one in everybodys]


if __name__ == "__main__":
    main(train)
