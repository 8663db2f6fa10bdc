"""Goodput counts the time of steps that the run kept against all the time that it had nodes."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gradus.record.goodput import GoodputMeter, run_goodput

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


def event(seconds: float, name: str, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return {"time": at(seconds), "event": name, "attempt": attempt, **fields}


def rows(first: int, last: int, attempt: int = 1, seconds: float = 1.0, every: int = 1) -> list[dict[str, Any]]:
    return [
        {"step": step, "attempt": attempt, "step_seconds": seconds}
        for step in range(first, last + 1)
        if step % every == 0 or step == 1
    ]


def meter(events: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> GoodputMeter:
    made = GoodputMeter()
    made.add_events(events)
    made.add_metrics(metrics)
    return made


def test_an_undisturbed_run_loses_only_what_is_no_step():
    events = [event(0, "launch"), event(20, "start", step=0), event(100, "end")]
    further = [{"step": 60, "attempt": 1, "evaluation_seconds": 10.0}, {"step": 60, "checkpoint_stall_seconds": 2.0}]
    found = meter(events, rows(1, 60) + [{**row, "attempt": 1} for row in further]).goodput()
    assert found.share == 0.6
    assert (found.starting_seconds, found.evaluation_seconds, found.saving_seconds) == (20, 10, 2)
    assert (found.other_seconds, found.lost_steps, found.waiting_seconds) == (8, 0, 0)


def test_steps_that_were_made_again_count_once():
    events = [event(0, "launch"), event(0, "start", step=0), event(70, "end")]
    events += [event(100, "launch", 2), event(100, "start", 2, step=50), event(150, "end", 2)]
    found = meter(events, rows(1, 70) + rows(51, 100, 2)).goodput()
    assert (found.allocated_seconds, found.waiting_seconds) == (120, 30)
    assert (found.kept_seconds, found.lost_seconds, found.lost_steps) == (100, 20, 20)
    assert found.share == pytest.approx(100 / 120)


@pytest.mark.parametrize("every", [1, 10, 25])
def test_what_was_kept_does_not_depend_on_how_often_steps_are_logged(every):
    events = [event(0, "start", step=0), event(75, "checkpoint", step=75), event(80, "end")]
    events += [event(100, "start", 2, step=75), event(125, "finish", 2, step=100), event(125, "end", 2)]
    found = meter(events, rows(1, 80, every=every) + rows(76, 100, 2, every=every)).goodput()
    assert found.kept_seconds == pytest.approx(100)


def test_attempts_of_one_job_share_their_allocation():
    """In a job that goes on after a failure, the time between two attempts is paid for."""
    first, second = {"job_id": 7, "restart": 0}, {"job_id": 7, "restart": 1}
    events = [event(0, "job", **first), event(0, "start", step=0), event(50, "end")]
    events += [event(60, "job", 2, **first), event(60, "start", 2, step=50), event(100, "end", 2)]
    events += [event(500, "job", 3, **second), event(500, "start", 3, step=90), event(510, "end", 3)]
    found = meter(events, rows(1, 50) + rows(51, 90, 2) + rows(91, 100, 3)).goodput()
    assert (found.allocated_seconds, found.waiting_seconds) == (110, 400)


def test_what_was_rolled_back_in_an_attempt_is_lost():
    metrics = [*rows(1, 20), {"rolled_back_to": 15, "attempt": 1}, *rows(16, 30)]
    found = meter([event(0, "start", step=0), event(35, "end")], metrics).goodput()
    assert (found.kept_seconds, found.lost_seconds, found.lost_steps) == (30, 5, 5)


def test_a_checkpoint_that_was_rolled_back_past_is_no_progress():
    events = [event(0, "start", step=0), event(20, "checkpoint", step=20), event(25, "end")]
    found = meter(events, [*rows(1, 20), {"rolled_back_to": 15, "attempt": 1}]).goodput()
    assert (found.kept_seconds, found.lost_steps) == (15, 5)


def test_an_attempt_that_was_killed_lasted_as_long_as_its_steps():
    found = meter([event(0, "launch"), event(10, "start", step=0)], rows(1, 90)).goodput()
    assert found.allocated_seconds == 100


def test_a_running_attempt_counts_until_now():
    made = meter([event(0, "launch"), event(10, "start", step=0)], rows(1, 40))
    assert made.goodput(until=BEGAN + timedelta(seconds=80), running=1).share == 0.5


def test_one_job_of_a_run_counts_from_when_its_nodes_were_given_to_it():
    events = [event(0, "start", step=0), event(50, "end"), event(100, "start", 2, step=50), event(150, "end", 2)]
    made = meter(events, rows(1, 50) + rows(51, 100, 2))
    since, until = BEGAN + timedelta(seconds=50), BEGAN + timedelta(seconds=150)
    assert made.goodput(attempts=[2], since=since, until=until).share == 0.5


def test_a_script_has_no_goodput(run):
    assert run_goodput(run).share is None
    assert meter([event(0, "launch"), event(50, "end")], []).goodput().share is None


def test_records_that_make_no_sense_are_passed_over():
    odd: list[dict[str, Any]] = [{}, {"step": "3"}, {"step": 1, "step_seconds": "NaN"}, {"step": True, "attempt": None}]
    odd += [{"time": "yesterday", "attempt": 1, "event": "start"}, {"attempt": "1", "time": at(0)}]
    assert meter(odd, odd).goodput().share is None


def test_metrics_may_be_added_as_they_come_with_the_same_result():
    events = [event(0, "launch"), event(10, "start", step=0), event(100, "end")]
    at_once, bit_by_bit = meter(events, rows(1, 60)), GoodputMeter()
    for each in events:
        bit_by_bit.add_events([each])
    for row in rows(1, 60):
        bit_by_bit.add_metrics([row])
    assert at_once.goodput() == bit_by_bit.goodput()
