"""Announcements: all ranks act at the same step boundary, however far apart they are within what can happen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from fault_cases import announced_twice, boundaries, read_late
from pool import Pool

from gradus.faults.announcements import NOTICE_STEPS, Announcements
from gradus.parallel.world import alone


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("save_share", [0.05, 1.0])
def test_all_ranks_act_at_the_same_boundaries(pool: Pool, seed: int, save_share: float) -> None:
    first, *others = pool.run(3, boundaries, seed, 40, save_share)
    assert first[-1] == ("stop", 40 + NOTICE_STEPS)
    assert any(action == "save" for action, _ in first)
    assert others == [first, first]


def test_a_rank_that_hears_of_two_saves_at_once_makes_both(pool: Pool) -> None:
    expected = [[NOTICE_STEPS, 2 * NOTICE_STEPS + 1]]
    assert pool.run(2, read_late) == [expected, expected]


def test_a_world_of_one_acts_at_once() -> None:
    announcements = Announcements(alone(torch.device("cpu")))
    assert not announcements.due("stop", 3)
    announcements.announce("stop", 4)
    assert announcements.due("stop", 4)
    assert not announcements.due("stop", 5), "once"


def test_stop_and_save_do_not_disturb_each_other() -> None:
    announcements = Announcements(alone(torch.device("cpu")))
    announcements.announce("save", 4)
    announcements.announce("stop", 4)
    assert announcements.due("save", 4)
    assert announcements.due("stop", 4)


def test_an_announcement_that_is_still_to_come_is_not_repeated(pool: Pool) -> None:
    assert pool.run(3, announced_twice) == [[2 + NOTICE_STEPS]] * 3


def test_a_store_whose_rank_has_left_announces_nothing_more() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

    follower = replace(alone(torch.device("cpu")), rank=1, size=2, store=Gone())  # type: ignore[arg-type]
    assert Announcements(follower).taken("committed", 5) is None
