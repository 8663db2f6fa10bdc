"""Waiting for the slowest rank, separated from transfer."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_traces import ALL_REDUCE, GEMM, TALK, Trace

from gradus.diagnosis.timeline.analysis import TraceAnalysis, analyse, skew
from gradus.schema.errors import InputError


def rank_trace(folder: Path, rank: int, work: float, until: float, group: str = "0") -> TraceAnalysis:
    """A rank that computes for so long and then is in a collective until the slowest has come and it is done."""
    trace = Trace(distributedInfo={"rank": rank, "world_size": 3})
    offset = 777.0 * rank  # clocks of nodes do not agree
    for step in range(2):
        start = offset + 1000 * step
        trace.step(start, start + 1000)
        trace.kernel(GEMM, start, start + work, launched=start + 1)
        arguments = {
            "Collective name": "allreduce",
            "Process Group Name": group,
            "In msg nelems": 100,
            "dtype": "Float",
        }
        trace.kernel(ALL_REDUCE, start + work, start + until, launched=start + 2, stream=TALK, **arguments)
    return analyse(trace.write(folder / f"attempt-1-rank-{rank}.json"))


def test_the_last_to_arrive_waits_for_nobody(tmp_path: Path) -> None:
    found = skew([rank_trace(tmp_path, rank, work, until=900) for rank, work in enumerate((300, 800, 500))])
    assert found.ranks == (0, 1, 2)
    assert found.collectives == 2
    assert found.transfer_seconds == pytest.approx(2 * 100e-6)
    assert found.waiting_seconds == {
        0: pytest.approx(2 * 500e-6),
        1: pytest.approx(0),
        2: pytest.approx(2 * 300e-6),
    }
    assert (found.slowest, found.slowest_share) == (1, 1.0)


def test_a_collective_has_its_size_and_group_from_the_trace(tmp_path: Path) -> None:
    first = rank_trace(tmp_path, 0, 300, 900).collectives[0]
    assert (first.bytes, first.group, first.step) == (400, "0", 0)


def test_groups_of_other_ranks_are_not_compared(tmp_path: Path) -> None:
    analyses = [rank_trace(tmp_path, 0, 300, 900), rank_trace(tmp_path, 1, 800, 900, group="other")]
    assert skew(analyses).collectives == 0
    assert skew(analyses).slowest is None


def test_two_traces_of_one_rank_are_refused(tmp_path: Path) -> None:
    one = rank_trace(tmp_path, 0, 300, 900)
    with pytest.raises(InputError, match="several are of rank 0"):
        skew([one, one])
