"""Predictions in words: rounded for people, in GiB, and never a number that was not predicted."""

from __future__ import annotations

import pytest
from predicted_choices import CHOICES, GIB, prediction

from gradus.planner.defaults import Choice
from gradus.planner.shown import (
    budget_lines,
    cells,
    gib_text,
    long_text,
    memory_title,
    memory_waterfall,
    numbers,
    seconds_text,
    step_title,
    step_waterfall,
)
from gradus.schema.plan import Plan
from gradus.schema.prediction import BudgetPrediction


def test_a_row_says_what_sets_a_plan_apart():
    assert cells(CHOICES[1]) == {
        "plan": "replicate 2 × pipeline 4 × shard 8 × tensor 2, interleaved ×2",
        "memory": "77.0 of 80.0 GiB, tight",
        "step": "2.5 s",
        "zero": "1",
        "micro-batch": "2 × 16",
        "recompute": "full",
        "rate": "500 k tok/s",
        "MFU": "41.0%",
        "run": "3.01 days",
        "cost": "92,444",
    }
    assert numbers(CHOICES[1])["run"] == 104_000 * 2.5


def test_what_is_not_known_is_empty():
    row = cells(Choice(Plan(), {}, prediction(step=None, mfu=None, tokens_per_second=None, budget=None)))
    assert (row["step"], row["MFU"], row["run"], row["cost"]) == ("", "", "", "")
    assert row["rate"] == "625 samples/s"
    unknown = cells(Choice(Plan(), {}))
    assert (unknown["memory"], unknown["rate"], unknown["plan"]) == ("", "", "1 rank")


def test_bars_of_memory_follow_one_another_up_to_the_peak():
    fall = memory_waterfall(CHOICES[0].prediction)
    assert [bar.kind for bar in fall.bars][3:6] == ["optimizer state", "activations", "logits and loss"]
    for bar, following in zip(fall.bars, fall.bars[1:], strict=False):
        assert bar.end == pytest.approx(following.start)
    assert fall.bars[0].start == 0
    assert fall.bars[-1].end == pytest.approx(fall.total.end) == pytest.approx(65 / 80)
    assert fall.limit == 1.0
    assert sum(bar.share for bar in fall.bars) == pytest.approx(1)
    assert "communication" not in {bar.kind for bar in fall.bars}, "of which there is none"


def test_what_exceeds_the_limit_reaches_beyond_its_mark():
    fall = memory_waterfall(prediction(79))
    assert fall.total.end == 1.0
    assert fall.limit == pytest.approx(80 / 120)
    assert memory_title(prediction(79)).endswith(
        "120 of 80.0 GiB, no (±5%, 40.0 GiB too much); peak in: backward of block 23"
    )
    assert memory_waterfall(prediction(limit_bytes=None)).limit is None


def test_hidden_communication_is_beside_the_sum():
    fall = step_waterfall(CHOICES[0].prediction.step)
    assert fall.bars[-1].end == pytest.approx(1)
    assert (fall.hidden.kind, fall.hidden.text) == ("hidden communication", "310 ms, at the same time")
    assert step_title(CHOICES[0].prediction) == (
        "Time of a step: 1.6 s · 781 k tok/s · MFU 41.0% of 312 TFLOP/s · HFU 51.2%"
    )
    doubtful = CHOICES[0].prediction.model_copy(update={"step_error": 0.25})
    assert step_title(doubtful).startswith("Time of a step: 1.6 s ±25% · ")


def test_the_whole_run_in_lines():
    assert budget_lines(CHOICES[0].prediction.budget, CHOICES[0].plan) == [
        "100,000 steps in 1 d 20:26:40 of training",
        "with checkpoints and failures 1 d 22:13:20: goodput 96.2%",
        "a checkpoint stops training for 20 s and is written 1:58 min later, best every 2:43:20 h",
        "every 10:00 min, as checkpoint_every says, they take 3% of the time",
        "5,916 GPU-hours, 2,367 kWh, cost 59,164",
    ]
    assert budget_lines(BudgetPrediction(steps=1, seconds=0.25, gpu_hours=0.0), Plan()) == [
        "1 step in 250 ms of training"
    ]
    never = BudgetPrediction(steps=9, seconds=9.0, seconds_with_failures=float("inf"), gpu_hours=0.0, goodput=0.0)
    assert budget_lines(never, Plan())[1].startswith("it never ends: nodes fail faster than ")
    endless = never.model_copy(update={"gpu_hours": float("inf")})
    assert not any("inf" in line for line in budget_lines(endless, Plan()))
    short = BudgetPrediction(
        steps=9,
        seconds=9.0,
        gpu_hours=0.0,
        checkpoint_stall_seconds=0.5,
        checkpoint_seconds=3.0,
        checkpoint_every_seconds=9.0,
    )
    assert budget_lines(short, Plan())[1] == (
        "a checkpoint stops training for 500 ms and is written 3 s later, best once, at the end"
    )


def test_an_interval_in_steps_is_weighed_too():
    found = BudgetPrediction(
        steps=1000, seconds=2000.0, gpu_hours=0.0, checkpoint_stall_seconds=20.0, checkpoint_seconds=60.0
    )
    assert "every 1:40 min, as checkpoint_every says, they take 17% of the time" in budget_lines(
        found, Plan(checkpoint_every=50)
    )
    assert len(budget_lines(found, Plan(checkpoint_every=900))) == 2, "a hundredth is not worth a line"
    assert budget_lines(found, Plan(checkpoint_every="30s"))[2] == (
        "every 30 s, as checkpoint_every says, is more often than they can be written: training waits 62% of the time"
    )


def test_an_interval_that_is_left_to_the_run_is_not_made_up():
    found = BudgetPrediction(
        steps=1000, seconds=2000.0, gpu_hours=0.0, checkpoint_stall_seconds=0.2, checkpoint_seconds=60.0
    )
    assert budget_lines(found, Plan(checkpoint_every="auto"))[1:] == [
        "a checkpoint stops training for 200 ms and is written 1:00 min later",
        "checkpoint_every auto: the run decides how often, from the stall that it measures",
    ]
    expected = found.model_copy(update={"checkpoint_every_seconds": 300.0})
    assert budget_lines(expected, Plan(checkpoint_every="auto"))[2].endswith("it measures; expected every 5:00 min")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (4.2e-5, "42 µs"), (0.0123, "12.3 ms"), (0.9999, "1 s"), (59.94, "59.9 s"), (200, "3:20 min")],
)
def test_seconds_as_people_say_them(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(30, "30 s"), (125, "2:05 min"), (18_720, "5:12:00 h"), (90_000, "1 d 01:00:00"), (2_929_000, "33.9 days")],
)
def test_long_times_as_people_say_them(seconds, text):
    assert long_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0.00"), (1, "<0.01"), (0.44 * GIB, "0.44"), (9 * GIB, "9.00"), (61.24 * GIB, "61.2"), (1.5e3 * GIB, "1,500")],
)
def test_memory_in_gib(count, text):
    assert gib_text(count) == f"{text} GiB"
