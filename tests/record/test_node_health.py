"""Health of a thousand ranks is read in a line for each node, the worst first, whatever the file lacks."""

from __future__ import annotations

from typing import Any

import pytest

from gradus.record.node_health import health_of, read_health


def rank(number: int, node: str, step: int = 100, phase: str = "forward", seconds: float = 0.1) -> dict[str, Any]:
    times = {"phase_seconds": seconds, "own_seconds": 0.2 + number / 1000, "data_seconds": 0.01}
    return {"rank": number, "node": node, "step": step, "phase": phase, **times, "memory_peak_bytes": number}


def test_a_node_is_as_its_worst_rank_is():
    ranks = [rank(0, "n1"), rank(1, "n1", step=97, phase="all-reduce", seconds=9.0), rank(2, "n2")]
    health = health_of({"step": 100, "ranks": ranks, "stragglers": []})
    first = health.nodes[0]
    assert (first.node, first.ranks, first.step, first.behind) == ("n1", 2, 97, 3)
    assert (first.phase, first.phase_seconds, first.own_seconds, first.memory_peak_bytes) == (
        "all-reduce",
        9.0,
        0.201,
        1,
    )


def test_the_worst_comes_first_silent_before_slow_before_behind():
    ranks = [rank(0, "ok"), rank(1, "behind", step=90), rank(2, "slow"), rank(3, "silent", phase="silent")]
    ranks.append(rank(4, "waits", seconds=30))
    slow = [{"rank": 2, "node": "slow", "ratio": 3.1, "since_step": 40}]
    health = health_of({"step": 100, "ranks": ranks, "stragglers": slow})
    assert [node.node for node in health.nodes] == ["silent", "slow", "behind", "waits", "ok"]
    assert health.nodes[1].slowest_ratio == 3.1
    assert (health.stragglers[0].rank, health.stragglers[0].since_step) == (2, 40)


def test_a_thousand_ranks_are_a_line_for_each_node():
    ranks = [rank(number, f"n{number // 8}") for number in range(1000)]
    health = health_of({"step": 100, "ranks": ranks, "stragglers": []})
    assert (health.ranks, len(health.nodes)) == (1000, 125)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"ranks": None, "stragglers": 3, "step": "x", "time": 7},
        {"ranks": [1, {}, {"rank": "0"}, {"rank": 0}], "stragglers": [{}, {"rank": 1}, None]},
        {"ranks": [{"rank": 0, "node": None, "step": None, "phase_seconds": float("nan")}]},
    ],
)
def test_whatever_is_missing_ends_nobody_who_looks(document):
    assert health_of(document).ranks <= 1


def test_half_a_file_is_no_health(run):
    assert read_health(run) is None
    (run.path / "health.json").write_text('{"time": "2026-')
    assert read_health(run) is None
    (run.path / "health.json").write_text('{"time": "2026-01-01T00:00:00+00:00", "ranks": []}')
    health = read_health(run)
    assert health is not None
    assert health.time is not None
