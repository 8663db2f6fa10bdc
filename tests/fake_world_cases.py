"""One rank of a world of any size, without the others: its groups are torch's fake ones, which send nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# It also makes the backend "fake" known.
from torch.testing._internal.distributed.fake_pg import FakeStore

from gradus.models import catalogue
from gradus.parallel.layout import DIMENSIONS
from gradus.parallel.world import World
from gradus.schema.plan import Mesh
from gradus.schema.recipe import Recipe
from gradus.training.objective import Objective
from gradus.training.pipeline_step import wiring_of
from gradus.training.precision import numbers_for
from gradus.training.preparation import prepared

CPU = torch.device("cpu")


def part_of_rank(alone: World, rank: int, recipe: Recipe) -> dict[str, Any]:
    """What a rank has after preparation: the shape of each parameter whole and here, its blocks, its groups."""
    plan = recipe.plan
    size = plan.mesh.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        world = World(rank, rank % 8, size, CPU, mesh=Mesh(replicate=size)).arranged(plan.mesh)
        with torch.device("meta"):
            model = catalogue.build(recipe.model.use, recipe.model.options)
        tokens = torch.zeros(1, recipe.model.options["context"], dtype=torch.int64)
        wiring = wiring_of(model, recipe, plan, Objective(recipe, model), (tokens, tokens))
        numbers = numbers_for(plan.precision, CPU)
        part = prepared(model, recipe, plan, world, numbers, some_rank_may_pad=False, wiring=wiring)
        groups = {name: world.submesh(name).get_group() for name in DIMENSIONS}
        groups["shard, context"] = world.flat_mesh("shard", "context").get_group()
        return {
            "whole": {name: tuple(p.shape) for name, p in part.named_parameters()},
            "here": {name: _here(p) for name, p in part.named_parameters()},
            "on meta": all(p.is_meta for p in part.parameters()),
            "sharded apart": [name for name, module in part.named_modules() if isinstance(module, FSDPModule)],
            "blocks": [list(stage.pipeline_place.blocks) for stage in part.pipeline_cut.stages],
            "groups": {name: dist.get_process_group_ranks(group) for name, group in groups.items()},
            "data": (world.data_rank, world.data_ranks),
        }
    finally:
        dist.destroy_process_group()


def _here(parameter: torch.Tensor) -> tuple[int, ...]:
    assert isinstance(parameter, DTensor)
    return tuple(parameter.to_local().shape)
