"""When a checkpoint is due."""

from __future__ import annotations

import math

import pytest

from gradus.planner.budget import ASSUMED_FAILURES_PER_NODE_DAY, between_failures, daly_interval
from gradus.schema.cluster import Cluster
from gradus.schema.plan import Mesh, Plan
from gradus.training import save_interval
from gradus.training.save_interval import FIRST_SECONDS, SaveInterval


def test_steps_are_counted_and_not_timed(clock: list[float]) -> None:
    interval = SaveInterval(100, 1e6)
    assert [step for step in range(301) if interval.due_after(step)] == [100, 200, 300]
    clock[0] += 1e9
    assert not interval.due_now()


def test_a_time_counts_from_the_last_checkpoint(clock: list[float]) -> None:
    interval = SaveInterval("12m", 1e6)
    clock[0] += 719
    assert not interval.due_now()
    clock[0] += 1
    assert interval.due_now()
    assert not interval.due_after(720)
    interval.began()
    assert not interval.due_now()


def test_auto_is_the_interval_that_pays_for_the_stall_that_was_measured(clock: list[float]) -> None:
    interval = SaveInterval("auto", 50_000.0)
    clock[0] += FIRST_SECONDS
    assert interval.due_now(), "the first one shows what one costs"
    interval.began()
    interval.took(0.5, 20.0)
    assert interval.seconds == daly_interval(0.5, 50_000.0) == pytest.approx(math.sqrt(2 * 0.5 * 50_000), rel=0.01)
    interval.took(40.0, 60.0)
    interval.took(40.0, 60.0)
    assert interval.seconds == daly_interval(40.0, 50_000.0), "the median of the last few"


def test_auto_never_begins_one_before_the_last_is_written() -> None:
    interval = SaveInterval("auto", 100.0)
    interval.took(0.001, 900.0)
    assert interval.seconds == 900.0


def test_more_nodes_fail_more_often() -> None:
    cluster = Cluster(name="c", nodes=64, gpus_per_node=8, gpu="H100-SXM", cpu_cores=64, memory_gib=512)
    day = 86400.0
    assert between_failures(Plan(), None) == day / ASSUMED_FAILURES_PER_NODE_DAY
    sixteen_nodes = Plan(mesh=Mesh(replicate=128), micro_batch=1)
    known = cluster.model_copy(update={"failures_per_node_day": 0.01})
    assert between_failures(sixteen_nodes, known) == pytest.approx(day / 0.16)
    never = cluster.model_copy(update={"failures_per_node_day": 0.0})
    assert between_failures(sixteen_nodes, never) == math.inf


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(save_interval.time, "monotonic", lambda: now[0])
    return now
