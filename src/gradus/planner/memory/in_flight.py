"""In flight: how many micro-batches a pipeline rank holds of each of its stages while it works on one. No torch.

The orders are those of torch's schedules (torch.distributed.pipelining.schedules), which follow the papers: GPipe
(Huang et al. 2019, arXiv:1811.06965), 1F1B and interleaved (Narayanan et al. 2021, arXiv:2104.04473, section 2.2) and
zero-bubble (Qi et al. 2023, arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

Phase = Literal["forward", "backward"]


class Situation(NamedTuple):
    """A rank at work on a micro-batch in one of its stages, and how many others it holds of each stage."""

    phase: Phase
    stage: int  # among the rank's own
    others: tuple[int, ...]  # that are between their forward and the end of their backward, by stage
    after_backward: bool  # of some micro-batch, on this rank


@lru_cache(maxsize=4096)
def situations(schedule: str, rank: int, ways: int, stages_per_rank: int, micro_batches: int) -> tuple[Situation, ...]:
    """Those that can need most: of two that differ only in what else is held, the fuller one."""
    counts = [0] * stages_per_rank
    found: dict[tuple[Phase, int, bool], set[tuple[int, ...]]] = {}
    after_backward = False
    for work, stage in _order(schedule, rank, ways, stages_per_rank, micro_batches):
        phase: Phase = "forward" if work == "F" else "backward"
        counts[stage] += {"F": 1, "I": 0, "B": 0, "W": 0}[work]
        others = list(counts)
        others[stage] -= 1
        found.setdefault((phase, stage, after_backward), set()).add(tuple(others))
        after_backward |= phase == "backward"
        counts[stage] -= {"F": 0, "I": 0, "B": 1, "W": 1}[work]
    assert not any(counts), f"{schedule} leaves {counts} micro-batches"
    return tuple(
        Situation(phase, stage, others, after)
        for (phase, stage, after), held in found.items()
        for others in _fullest(held)
    )


def most_in_flight(schedule: str, rank: int, ways: int, stages_per_rank: int, micro_batches: int) -> int:
    """Micro-batches that a rank holds at most, those of different stages counted apart."""
    held = situations(schedule, rank, ways, stages_per_rank, micro_batches)
    return max(sum(situation.others) + 1 for situation in held)


def _order(schedule: str, rank: int, ways: int, per_rank: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """What a rank does, one after another: forward F, backward B; or its half for inputs I, and for weights W."""
    total = micro_batches * per_rank
    if schedule == "gpipe":
        yield from [("F", 0)] * total
        yield from [("B", 0)] * total
        return
    halves = schedule == "zero-bubble"
    round_size = micro_batches // max(1, micro_batches // ways)  # micro-batches that a stage takes before the next
    if schedule == "1f1b":
        warm_up = min(micro_batches, ways - rank) - 1  # one more forward is done before the first backward
    else:
        hops = (1 if halves else 2) * (ways - 1 - rank)
        warm_up = min((per_rank - 1) * round_size + hops, total)
    weights_done = 0

    def backward_stage(number: int) -> int:
        return per_rank - 1 - (number // round_size) % per_rank

    for number in range(warm_up):
        yield "F", (number // round_size) % per_rank
    for number in range(warm_up, warm_up + total):
        if number < total:
            yield "F", (number // round_size) % per_rank
        yield "I" if halves else "B", backward_stage(number - warm_up)
        if halves and number - warm_up >= rank:
            yield "W", backward_stage(weights_done)
            weights_done += 1
    while halves and weights_done < total:
        yield "W", backward_stage(weights_done)
        weights_done += 1


def _fullest(held: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    def within(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    return [one for one in sorted(held) if not any(within(one, other) for other in held)]
