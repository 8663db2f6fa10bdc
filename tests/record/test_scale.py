"""Scales: every value has its place, and ticks are numbers that people would choose."""

from __future__ import annotations

import math

import pytest

from gradus.record.scale import Scale, roomy, scale_of, tick_text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (1.2, 5.9, [2, 3, 4, 5]),
        (-3, 3, [-3, -2, -1, 0, 1, 2, 3]),
        (0.0011, 0.0029, [0.0015, 0.002, 0.0025]),
        (12_000, 1_050_000, [200_000, 400_000, 600_000, 800_000, 1_000_000]),
    ],
)
def test_ticks_are_round_numbers_inside_the_axis(low, high, ticks):
    assert Scale(low, high).ticks() == pytest.approx(ticks)


@pytest.mark.parametrize("low", [1e-9, 1e-3, 0.7, 1, 3, 1e6])
@pytest.mark.parametrize("factor", [1.001, 1.5, 4, 30, 1e4, 1e12])
def test_a_logarithmic_axis_has_two_to_nine_ticks_inside(low, factor):
    scale = Scale(low, low * factor, log=True)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 9
    assert all(-0.001 <= scale.share(tick) <= 1.001 for tick in ticks)


def test_gpus_are_at_powers_of_two():
    assert scale_of([1, 8], log=True, base=2).ticks() == [1, 2, 4, 8]


def test_the_ends_of_the_axis_are_at_its_ends():
    for scale in (Scale(-2, 6), Scale(1e-5, 1e3, log=True)):
        assert scale.share(scale.low) == 0
        assert scale.share(scale.high) == 1
    assert Scale(1, 100, log=True).share(10) == pytest.approx(0.5)


def test_one_value_alone_still_has_an_axis():
    for value in (0.0, 5.0, -1e-7, 1e12):
        scale = scale_of([value])
        assert scale.low < value < scale.high or scale.low <= value < scale.high
        assert len(scale.ticks()) >= 1
    assert scale_of([0.0], from_zero=True).low == 0


def test_what_is_not_finite_or_not_positive_does_not_move_the_axis():
    assert scale_of([1, math.nan, 2, math.inf]) == Scale(1, 2)
    assert scale_of([-1, 0, 1, 10], log=True) == Scale(1, 10, True)
    assert not scale_of([-1, 0], log=True).log


def test_amounts_that_cannot_be_negative_get_no_negative_axis():
    assert roomy(Scale(0, 10)).low == 0
    assert roomy(Scale(0.1, 10)).low == 0
    assert roomy(Scale(-1, 1)).low < -1


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [
        (0.0, 1, "0"),
        (2, 1, "2"),
        (2, 0.5, "2.0"),
        (0.25, 0.05, "0.25"),
        (12_000, 2000, "12,000"),
        (2_500_000, 500_000, "2.5 M"),
        (1e12, 1e12, "1 T"),
        (3e-5, 1e-5, "3e-5"),
        (-3, 1, "−3"),
        (0.1234567, None, "0.1235"),
        (1e-17, 0.2, "0"),
    ],
)
def test_ticks_are_written_short(value, step, text):
    assert tick_text(value, step) == text
