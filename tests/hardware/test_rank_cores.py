"""Cores of a rank: bound ones are its own, others are shared."""

from __future__ import annotations

import os

import pytest

from gradus.hardware import rank_cores
from gradus.hardware.rank_cores import cores_of_rank


@pytest.mark.parametrize(("ranks", "cores"), [(1, 8), (2, 4), (3, 2), (16, 1)])
def test_ranks_that_may_use_the_same_cores_share_them(monkeypatch: pytest.MonkeyPatch, ranks: int, cores: int) -> None:
    monkeypatch.setattr(rank_cores, "usable_cores", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cores_of_rank(ranks) == cores


def test_cores_that_a_rank_is_bound_to_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_cores, "usable_cores", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)) if pid == 0 else set(range(16)))
    assert cores_of_rank(4) == 4


def test_here_there_is_at_least_one_core_and_no_more_than_are_allowed() -> None:
    assert 1 <= cores_of_rank(1) <= len(os.sched_getaffinity(0))
