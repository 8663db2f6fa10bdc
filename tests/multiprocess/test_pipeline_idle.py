"""How long ranks wait in each schedule: by what they really do when, and by torch's own tables."""

from __future__ import annotations

import re

import pytest
from pipeline_cases import order_of, performed
from pool import Pool

from gradus.parallel.stages import bubble

RANKS, MICRO_BATCHES = 4, 8
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]
Order = dict[int, list[str | None]]


def actions(row: list[str | None]) -> list[tuple[int, str, int]]:
    """(stage, kind, micro-batch): F forward, B backward, or its halves I (inputs) and W (weights)."""
    found = [re.fullmatch(r"(\d+)([FBIW])(\d+)", action) for action in row if action is not None]
    return [(int(match[1]), match[2], int(match[3])) for match in found if match]


def simulated_idle(order: Order, stages: int) -> list[float]:
    """Idle time of each rank over its working time, if forward and both halves of backward take one unit each."""
    ready: dict[tuple[int, str, int], int] = {}
    queues = {rank: actions(row) for rank, row in order.items()}
    clock, busy = dict.fromkeys(queues, 0), dict.fromkeys(queues, 0)
    while any(queues.values()):
        began = sum(map(len, queues.values()))
        for rank, queue in queues.items():
            while queue:
                stage, kind, number = queue[0]
                needs = {
                    "F": [(stage - 1, "F", number)] if stage else [],
                    "W": [(stage, "I", number)],
                }.get(kind, [(stage, "F", number)] + ([(stage + 1, "I", number)] if stage < stages - 1 else []))
                if any(need not in ready for need in needs):
                    break
                length = 2 if kind == "B" else 1
                clock[rank] = max([clock[rank], *(ready[need] for need in needs)]) + length
                busy[rank] += length
                ready[stage, "I" if kind == "B" else kind, number] = clock[rank]
                queue.pop(0)
        assert sum(map(len, queues.values())) < began, "ranks wait for each other"
    return [max(clock.values()) / busy[rank] - 1 for rank in queues]


@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)]
)
def test_torchs_order_leaves_ranks_idle_as_long_as_the_formula_says(pool: Pool, schedule: str, per_rank: int) -> None:
    order = pool.run(RANKS, order_of, schedule, per_rank, MICRO_BATCHES)[0]
    expected = bubble(schedule, RANKS, MICRO_BATCHES, per_rank)
    assert simulated_idle(order, RANKS * per_rank) == pytest.approx([expected] * RANKS)


@pytest.mark.parametrize("per_rank", [1, 2])
def test_zero_bubble_takes_backward_apart_and_never_waits_once_it_has_begun(pool: Pool, per_rank: int) -> None:
    order = pool.run(RANKS, order_of, "zero-bubble", per_rank, MICRO_BATCHES)[0]
    for rank, row in order.items():
        done = actions(row)
        stages = [rank + RANKS * index for index in range(per_rank)]
        for kind in "FIW":
            of_kind = {(stage, number) for stage, found, number in done if found == kind}
            assert of_kind == {(stage, number) for stage in stages for number in range(MICRO_BATCHES)}, kind
        for stage, kind, number in done:
            if kind == "W":
                assert done.index((stage, "I", number)) < done.index((stage, "W", number))
        first_backward = next(i for i, action in enumerate(row) if action is not None and "I" in action)
        assert None not in row[first_backward:], f"rank {rank} waits after its first backward"
        assert done[-1][1] == "W"
    # The last rank puts off what nobody waits for: the others get their gradients sooner.
    late = [kind for _, kind, _ in actions(order[RANKS - 1])]
    assert late.index("W") > late.index("I") + 1


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
def test_what_ranks_really_do_leaves_them_idle_as_long_as_the_formula_says(
    pool: Pool, schedule: str, per_rank: int
) -> None:
    """Whatever a machine is busy with: by the order in which each rank came to its work."""
    order = dict(enumerate(pool.run(RANKS, performed, schedule, per_rank, MICRO_BATCHES)))
    for rank, done in order.items():
        stages = [rank + RANKS * index for index in range(per_rank)]
        assert sorted(actions(done)) == sorted(
            (stage, kind, number) for stage in stages for kind in "FB" for number in range(MICRO_BATCHES)
        )
    expected = bubble(schedule, RANKS, MICRO_BATCHES, per_rank)
    assert simulated_idle(order, RANKS * per_rank) == pytest.approx([expected] * RANKS)


def test_interleaved_waits_least() -> None:
    idle = [bubble(schedule, RANKS, MICRO_BATCHES, per_rank) for schedule, per_rank in SCHEDULES]
    assert idle == sorted(idle, reverse=True)
    assert idle[-1] < idle[0]
