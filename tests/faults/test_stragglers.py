"""Stragglers: who is slow, since when and why, and when it is told."""

from __future__ import annotations

from typing import Any

from rank_reports import report

from gradus.faults.rank_report import RankReport
from gradus.faults.stragglers import LASTING_LOOKS, LASTING_STEPS, Change, Stragglers


def at(step: int, *own: float, data: dict[int, float] | None = None, kinds: str = "") -> dict[int, RankReport]:
    given = data or {}
    return {
        rank: report(
            rank,
            step=step,
            own_seconds=seconds,
            data_seconds=given.get(rank, 0.1),
            kind=int(kinds[rank]) if kinds else 0,
        )
        for rank, seconds in enumerate(own)
    }


def lasting(found: Stragglers, step: int, *own: float, **more: Any) -> list[Change]:
    """What is found when it stays like this for a while."""
    looks = [found.look(at(step + number * LASTING_STEPS, *own, **more)) for number in range(LASTING_LOOKS)]
    return [change for changes in looks for change in changes]


def test_a_rank_that_is_slow_for_long_enough_is_named_once_with_how_slow_and_since_when():
    found = Stragglers(window=20)
    assert found.look(at(100, 1.0, 1.0, 3.0, 1.1)) == []
    assert found.look(at(100 + LASTING_STEPS, 1.0, 1.0, 3.0, 1.1)) == []
    assert found.now == [], "not yet: it may be over in a moment"
    (change,) = found.look(at(101 + LASTING_STEPS, 1.0, 1.0, 3.0, 1.1))
    assert (change.begins, change.straggler.rank, change.straggler.ratio) == (True, 2, 3.0)
    assert change.straggler.since_step == 90, "a median over 20 steps turns after 10"
    assert "rank 2 on n1 is 3.0 times as slow as the others since about step 90" in change.message
    assert found.look(at(130, 1.0, 1.0, 3.1, 1.1)) == []
    assert [(one.rank, one.ratio) for one in found.now] == [(2, 3.1)]


def test_of_two_ranks_the_slow_one_is_compared_with_the_other():
    found = Stragglers()
    (change,) = lasting(found, 0, 3.0, 1.0)
    assert (change.straggler.rank, change.straggler.ratio) == (0, 3.0)


def test_one_that_recovers_is_told_of_too_and_one_on_the_edge_is_not_told_of_again_and_again():
    found = Stragglers()
    assert lasting(found, 0, 1.0, 1.0, 2.0)
    assert found.look(at(30, 1.0, 1.0, 1.4)) == [], "slow is what it was"
    (change,) = found.look(at(40, 1.0, 1.0, 1.1))
    assert not change.begins
    assert "rank 2 on n1 is no longer slow at step 40" in change.message
    assert found.now == []
    assert lasting(found, 50, 1.0, 1.0, 1.4) == []


def test_a_slow_moment_is_forgotten():
    found = Stragglers()
    found.look(at(0, 1.0, 2.0))
    found.look(at(4, 1.0, 2.0))
    found.look(at(5, 1.0, 1.0))
    assert found.look(at(LASTING_STEPS, 1.0, 2.0)) == []


def test_hundreds_of_short_steps_within_one_look_are_not_enough():
    found = Stragglers()
    found.look(at(0, 0.001, 0.003))
    assert found.look(at(1000, 0.001, 0.003)) == []


def test_it_says_whether_it_is_data_loading_or_computing():
    for data, why in (({1: 1.9}, "data loading"), ({1: 0.2}, "computing")):
        found = Stragglers()
        (change,) = lasting(found, 0, 1.0, 3.0, 1.0, data=data)
        assert change.straggler.why == why


def test_stages_of_a_pipeline_are_not_compared_with_each_other():
    found = Stragglers()
    assert lasting(found, 0, 1.0, 1.0, 3.0, 3.0, kinds="0011") == []
    (change,) = lasting(found, 60, 1.0, 1.0, 3.0, 6.0, kinds="0011")
    assert change.straggler.rank == 3


def test_nothing_is_said_before_all_ranks_have_measured_something():
    found = Stragglers()
    some = {**at(0, 1.0, 3.0), 2: report(2, own_seconds=None)}
    assert found.look(some) == found.look({**some, **at(50, 1.0, 3.0)}) == []
