"""Staged: the recipe's data on this node's own disk, before its ranks open it. What the data is does not change."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gradus.data.loader import Slices
from gradus.data.node_share import shards_needed
from gradus.data.orders import order_for
from gradus.data.progress import Progress
from gradus.data.staging import Job, staged_block
from gradus.parallel.layout import place_of
from gradus.planner.budget import length_of
from gradus.schema.recipe import Recipe
from gradus.training.building import open_data

if TYPE_CHECKING:
    from gradus.training.live_run import LiveRun


def staged_recipe(live: LiveRun) -> Recipe:
    """The recipe with paths on this node, to open data with. All ranks call it: one of each node copies, others wait.

    What cannot be staged is read where it is, and an event says why.
    """
    recipe = live.recipe
    if recipe.data.stage is None:
        return recipe
    progress = Progress("staging")
    job = Job(
        f"{live.run.path}:{live.attempt}",
        lambda done, total: progress.say(f"{done:,}{f' of {total:,}' if total else ''} bytes"),
        live.stop.seen,
    )
    block, results = staged_block(recipe.data, job, _needed(live))
    for result in results:
        numbers = {"copied_bytes": result.copied_bytes, "reused_bytes": result.reused_bytes, "here": result.here}
        live.recorder.event("staging", message=result.note, **numbers, linked_bytes=result.linked_bytes)
        if live.world.local_rank == 0:
            print(f"gradus: {result.note}", flush=True)
    return recipe.model_copy(update={"data": block})


def _needed(live: LiveRun) -> dict[str, set[str]]:
    """The files that ranks of this node read, by source; none where all are needed."""
    recipe, plan = live.recipe, live.plan
    if recipe.data.use not in ("shards", "mixture"):
        return {}
    data = open_data(recipe, "train")
    length = length_of(recipe, data.length, data.source.tokens_per_sample if data.source else None) if data else None
    if data is None or length is None or (recipe.data.shuffle == "full" and length.samples >= data.length):
        return {}
    first = live.world.rank - live.world.local_rank
    ranks = range(first, min(first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")), live.world.size))
    places = [place_of(rank, plan.mesh) for rank in ranks]
    data_ranks = sorted({place.replicate * plan.mesh.shard + place.shard for place in places})
    slices = [Slices(recipe.batch, plan.micro_batch, plan.accumulate, rank, length.samples) for rank in data_ranks]
    order = order_for(data, recipe.data, recipe.seed, recipe.batch)
    begin = live.checkpoint.step if live.checkpoint is not None else 0
    return shards_needed(data, order, slices, range(begin, length.steps))
