"""The same on all ranks: ranks that see another dataset or model would train on nonsense, or wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gradus.data.position import specification_hash
from gradus.parallel.world import World
from gradus.schema.errors import InputError

if TYPE_CHECKING:
    from gradus.training.live_run import LiveRun


def check_same_data_on_ranks(live: LiveRun) -> None:
    check_ranks_agree(
        live.world,
        {
            "training samples": live.train_data.length,
            "steps": live.total_steps,
            "evaluation batches": live.evaluator.batches if live.evaluator else 0,
        },
    )
    # As many samples need not be the same ones. 60 bits of the hash are a number that a tensor can hold.
    check_ranks_agree(
        live.world,
        {"specification": int(specification_hash(live.specification)[:15], 16)},
        "the data is not the same on all nodes; ranks that see other samples than rank 0: {ranks}",
        hint="compare the files under data.path on the nodes: their content, names and sizes",
    )


def check_ranks_agree(
    world: World,
    facts: dict[str, int],
    message: str = "the ranks do not agree on the number of {name}: {values}",
    hint: str = "the model and data callables must return the same on every rank",
) -> None:
    if world.size == 1:
        return
    mine = torch.tensor(list(facts.values()), dtype=torch.int64, device=world.device)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyone, mine)
    for name, values in zip(facts, torch.stack(everyone).T.tolist(), strict=True):
        if len(set(values)) > 1:
            others = ", ".join(str(rank) for rank, value in enumerate(values) if value != values[0])
            raise InputError(message.format(name=name, values=values, ranks=others), hint=hint, found=values)
