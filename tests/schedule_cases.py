"""What torch's own pipeline schedules accept, asked in the pool's processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from gradus.parallel.pipeline import over_stages
from gradus.parallel.stages import stages_of
from gradus.parallel.world import World
from gradus.schema.plan import Mesh


def accepted_by_torch(world: World, schedule: str, per_rank: int, counts: list[int]) -> list[int]:
    """The numbers of micro-batches for which the schedule can be made."""
    ways = world.size
    world = world.arranged(Mesh(pipeline=ways))
    group = world.submesh("pipeline").get_group()
    example = torch.empty(1, 2, device="meta")
    stages = [
        PipelineStage(nn.Linear(2, 2), n, ways * per_rank, world.device, (example,), (example,), group=group)
        for n in stages_of(world.place.pipeline, ways, per_rank)
    ]
    accepted = []
    for count in counts:
        try:
            over_stages(schedule, stages, count)
        except ValueError:
            continue
        accepted.append(count)
    return accepted
