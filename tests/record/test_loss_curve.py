"""The curve is of what the run kept, and a few blocks show its shape."""

import math

import pytest

from gradus.record.loss_curve import LossCurve, sparkline


def curve(*records):
    made = LossCurve()
    for record in records:
        made.add(record)
    return made


def test_what_an_attempt_makes_again_replaces_what_was_lost():
    lost = [{"step": step, "attempt": 1, "loss": 9.0} for step in (1, 2, 3, 4)]
    again = [{"step": 3, "attempt": 2, "loss": 1.0}]
    assert curve(*lost, *again).losses == [9.0, 9.0, 1.0]


def test_what_was_rolled_back_is_gone():
    made = curve(*({"step": step, "loss": float(step)} for step in range(1, 6)), {"rolled_back_to": 2})
    assert made.steps == [1, 2]


def test_lines_without_a_loss_are_passed_over():
    assert curve({"step": 1, "loss": None}, {"loss": 2.0}, {"step": "x", "loss": 1}, {}).last is None


def test_a_long_run_takes_no_more_memory_and_keeps_its_ends():
    made = curve(*({"step": step, "loss": float(step)} for step in range(1, 50_001)))
    assert len(made.losses) <= 4097
    assert made.last == 50_000
    assert made.losses == sorted(made.losses)


@pytest.mark.parametrize(
    ("values", "width", "shown"),
    [
        ([], 5, ""),
        ([1.0], 5, "▁"),
        ([2.0, 2.0], 5, "▁▁"),
        ([0.0, 7.0], 5, "▁█"),
        ([8.0, 8.0, 1.0, 1.0], 2, "█▁"),
        ([1.0, math.nan, 2.0], 3, "▁×█"),
        ([math.inf], 3, "×"),
        ([1.0, 2.0], 0, ""),
    ],
)
def test_blocks_follow_the_values(values, width, shown):
    assert sparkline(values, width) == shown
