"""Batch split: a rank's share of the batch cut into micro-batches; with a pipeline, into enough of them."""

from __future__ import annotations

from typing import Any, Literal

from gradus.parallel.split_rules import micro_batches_fit
from gradus.parallel.stages import bubble
from gradus.record.format import count_text
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan

ENOUGH = 4  # micro-batches for each stage: then a 1f1b pipeline idles for about a fifth of a step
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


def split_batch(
    batch: int, mesh: Mesh, schedule: Schedule, stages_per_rank: int, fixed: dict[str, Any]
) -> tuple[tuple[int, str], tuple[int, str]]:
    """micro_batch and accumulate, each with its reason. Their product with the data ranks is the batch if it can be."""
    micro_batch, accumulate = fixed.get("micro_batch"), fixed.get("accumulate")
    ranks = mesh.data_ranks
    if batch % ranks:
        below, above = batch - batch % ranks, batch + ranks - batch % ranks
        nearest = f"{below} or {above}" if below else f"{above}"
        raise InputError(
            f"batch: {batch} samples cannot be split evenly over {ranks} ranks",
            hint=f"use batch {nearest} (a run that goes on keeps its batch), or a number of ranks that divides {batch}",
            field="batch",
            found=batch,
            allowed=f"a multiple of {ranks}",
        )
    share = batch // ranks
    why = why_so_many = f"batch {batch} over {count_text(ranks, 'data rank')}"
    if mesh.pipeline > 1 and micro_batch is None and accumulate is None:
        accumulate = _micro_batches(share, mesh.pipeline, schedule)
        why_so_many = f"{accumulate} micro-batches for {mesh.pipeline} stages"
        idle = bubble(schedule, mesh.pipeline, accumulate, stages_per_rank)
        why_so_many += f": a rank idles for {idle:.0%} of the time that it works"
    if micro_batch is None:
        micro_batch = max(1, share // (accumulate or 1))
    if accumulate is None:
        accumulate = max(1, share // micro_batch)
    return (micro_batch, why), (accumulate, why_so_many)


def _micro_batches(share: int, stages: int, schedule: Schedule) -> int:
    """The smallest number that keeps the stages busy, else the largest there is; a multiple of the stages if it can be.

    Where none will do, it is the rules of what can be combined that refuse, with the numbers.
    """

    def fits(count: int) -> bool:
        return micro_batches_fit(Plan(mesh=Mesh(pipeline=stages), pipeline_schedule=schedule, accumulate=count))

    counts = [count for count in range(1, share + 1) if share % count == 0 and fits(count)] or [share]
    full_rounds = [count for count in counts if count % stages == 0]
    enough = [count for count in full_rounds if count >= ENOUGH * stages]
    return min(enough) if enough else max(full_rounds or counts)
