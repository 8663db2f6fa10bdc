"""How many micro-batches a rank of a pipeline holds: as published, and as torch's schedules go about it."""

from __future__ import annotations

from typing import Any

import pytest

from gradus.planner.memory.in_flight import most_in_flight, situations


@pytest.mark.parametrize(("rank", "held"), [(0, 4), (1, 3), (3, 1)])
def test_with_1f1b_an_earlier_stage_holds_more(rank: int, held: int) -> None:
    assert most_in_flight("1f1b", rank, 4, 1, 8) == held


def test_nobody_holds_more_micro_batches_than_there_are() -> None:
    assert most_in_flight("1f1b", 0, 8, 1, 3) == 3
    assert most_in_flight("interleaved", 0, 4, 2, 4) == 8, "four of each of two stages"


def test_with_gpipe_every_rank_holds_all() -> None:
    assert {most_in_flight("gpipe", rank, 4, 1, 8) for rank in range(4)} == {8}


@pytest.mark.parametrize(("ways", "per_rank"), [(4, 2), (8, 3), (35, 3)])
def test_interleaved_stages_hold_what_is_published(ways: int, per_rank: int) -> None:
    """On the first rank (1 + (p−1)/(p·v)) of all p·v stages (Korthikanti et al. 2022, arXiv:2205.05198, 4.2.3)."""
    published = (1 + (ways - 1) / (ways * per_rank)) * ways * per_rank
    assert most_in_flight("interleaved", 0, ways, per_rank, 4 * ways) == pytest.approx(published)


def test_zero_bubble_holds_what_1f1b_does_and_what_waits_for_its_weights() -> None:
    for rank in range(4):
        assert most_in_flight("zero-bubble", rank, 4, 1, 16) >= most_in_flight("1f1b", rank, 4, 1, 16)
    assert most_in_flight("zero-bubble", 3, 4, 1, 16) == 4, "the last rank puts its weights off"


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
@pytest.mark.parametrize(("ways", "per_rank", "micro_batches"), [(4, 2, 8), (2, 3, 6), (4, 1, 10), (4, 2, 3)])
def test_the_order_is_that_of_torch(schedule: str, ways: int, per_rank: int, micro_batches: int) -> None:
    for rank in range(ways):
        held = {tuple(s) for s in situations(schedule, rank, ways, per_rank, micro_batches)}
        assert held == _of_torch(schedule, rank, ways, per_rank, micro_batches)


def _of_torch(schedule: str, rank: int, ways: int, per_rank: int, micro_batches: int) -> set[Any]:
    """The fullest situations, from the list of actions that torch makes for a rank."""
    from torch.distributed.pipelining import schedules

    name = {"interleaved": "ScheduleInterleaved1F1B", "zero-bubble": "ScheduleInterleavedZeroBubble"}[schedule]
    made: Any = object.__new__(getattr(schedules, name))
    made.n_local_stages, made.pp_group_size, made._n_microbatches = per_rank, ways, micro_batches
    made.number_of_rounds = max(1, micro_batches // ways)
    made.microbatches_per_round = micro_batches // made.number_of_rounds
    held: set[tuple[int, int]] = set()
    found: set[Any] = set()
    after_backward = False
    for action in made._calculate_single_rank_operations(rank):
        if action is None:
            continue
        kind, stage = action.computation_type.name, action.stage_index // ways
        if kind == "FORWARD":
            held.add((stage, action.microbatch_index))
        others = [sum(s == one for s, _ in held) for one in range(per_rank)]
        others[stage] -= 1
        found.add(("forward" if kind == "FORWARD" else "backward", stage, tuple(others), after_backward))
        after_backward |= kind != "FORWARD"
        if kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"):
            held.remove((stage, action.microbatch_index))
    assert not held
    return {
        one
        for one in found
        if not any(
            one != other
            and (one[:2], one[3]) == (other[:2], other[3])
            and all(a <= b for a, b in zip(one[2], other[2], strict=True))
            for other in found
        )
    }
