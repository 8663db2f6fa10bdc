"""Stages: how the blocks of a model are dealt out to a pipeline, and how long a schedule lets ranks wait. No torch.

Stage s is on rank s modulo `pipeline` of its pipeline: with several stages per rank, each rank holds some early and
some late blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gradus.schema.errors import InputError


def stages_of(rank: int, ways: int, per_rank: int) -> list[int]:
    """The stages of the rank with this number in its pipeline."""
    return [rank + ways * index for index in range(per_rank)]


def ranges(counts: Sequence[int]) -> list[range]:
    """The blocks of each stage, of so many blocks each."""
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def check_enough_blocks(blocks: int, ways: int, per_rank: int, counts: Sequence[int] | None) -> None:
    """Refuse more stages than blocks, and numbers of blocks that do not add up, of a model that is known by now."""
    stages = ways * per_rank
    if stages > blocks:
        raise InputError(
            f"plan.mesh.pipeline: found {ways} × stages_per_rank {per_rank} = {stages} stages, but the model has "
            f"{blocks} blocks, and each stage needs one",
            hint=f"use plan.mesh.pipeline={max(1, blocks // per_rank)}",
            field="plan.mesh.pipeline",
            found=ways,
            allowed=f"at most {blocks // per_rank}",
        )
    if counts is not None and (sum(counts) != blocks or len(counts) != stages or min(counts) < 1):
        raise InputError(
            f"plan.stage_blocks: found {list(counts)}, {len(counts)} stages with {sum(counts)} blocks, but there are "
            f"{stages} stages and {blocks} blocks, one for each stage at least",
            hint="leave it out: stages are then balanced by cost",
            field="plan.stage_blocks",
            found=list(counts),
            allowed=f"{stages} numbers with the sum {blocks}",
        )


def balanced(costs: Sequence[float], stages: int, *, before: float = 0.0, after: float = 0.0) -> list[int]:
    """Numbers of blocks for each stage so that the slowest stage is as fast as can be, and the rest are alike.

    `costs` are those of the blocks; `before` belongs to the first stage (an embedding) and `after` to the last (a
    head). Each stage has at least one block.
    """
    assert 1 <= stages <= len(costs), f"{stages} stages, {len(costs)} blocks"
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, first: int, end: int) -> float:
        extra = (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)
        return sums[end] - sums[first] + extra

    def best(limit: float, worst_counts: bool) -> tuple[float, list[int]]:
        """The best way to end each stage: by the cost of the worst stage, or, below a limit, by the sum of squares."""
        found: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
        for stage in range(stages):
            following: dict[int, tuple[float, list[int]]] = {}
            for first, (value, counts) in found.items():
                for end in range(first + 1, len(costs) - (stages - 1 - stage) + 1):
                    here = cost(stage, first, end)
                    if here > limit:
                        continue
                    total = max(value, here) if worst_counts else value + here * here
                    if end not in following or total < following[end][0]:
                        following[end] = (total, [*counts, end - first])
            found = following
        return found[len(costs)]

    worst, _ = best(float("inf"), worst_counts=True)
    return best(worst * (1 + 1e-12), worst_counts=False)[1]  # within rounding


def bubble(schedule: str, ways: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Idle time of a rank in a step, in units of its working time, by the published formulas.

    gpipe and 1f1b: (p−1)/m; interleaved: (p−1)/(v·m) (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). For
    zero-bubble the formula of ZB-H1, the order that torch follows with one stage per rank: (p−1)·(F + B − W) of idle
    time, where F, B and W are forward and the two halves of backward, here taken as equal: (p−1)/(3·m) (Qi et al.
    2023, arXiv:2401.10241, table 1), and with v stages per rank 1/v of it, as for interleaved.
    """
    share = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1.0 / stages_per_rank, "zero-bubble": 1 / (3 * stages_per_rank)}
    return (ways - 1) * share[schedule] / micro_batches
