"""Amdahl's law: known speed-ups give their known fractions, with an interval that holds the truth."""

from __future__ import annotations

import random

import pytest

from gradus.record.amdahl import Measured, amdahl, efficiency, fraction_of, outside_the_law, speed_up


def by_law(fraction: float, gpus: int) -> float:
    return 1 / ((1 - fraction) + fraction / gpus)


def test_six_and_a_half_times_on_eight_is_0967():
    assert fraction_of(6.5, 8) == pytest.approx(0.967, abs=5e-4)
    found = amdahl([Measured(1, 100.0), Measured(8, 650.0)])
    assert found.fraction == pytest.approx(0.967, abs=5e-4)
    assert found.limit == pytest.approx(30.3, abs=0.1)
    assert found.text() == "0.967"


def test_the_labs_of_pytorch_and_tensorflow():
    for one, two, times, share in ((336.0, 650.3, 1.935, 0.968), (342.7, 628.4, 1.834, 0.917)):
        assert speed_up(Measured(2, two), Measured(1, one)) == pytest.approx(times, abs=1e-3)
        assert efficiency(Measured(2, two), Measured(1, one)) == pytest.approx(share, abs=1e-3)


def test_efficiency_is_for_each_gpu_of_any_baseline():
    assert efficiency(Measured(8, 700.0), Measured(4, 400.0)) == pytest.approx(0.875)


@pytest.mark.parametrize("fraction", [0.5, 0.9, 0.99, 1.0])
def test_points_on_the_law_give_it_back_also_without_a_single_gpu(fraction):
    points = [Measured(gpus, 10 * by_law(fraction, gpus)) for gpus in (2, 4, 8, 16)]
    found = amdahl(points)
    assert found.fraction == pytest.approx(fraction, abs=1e-9)
    assert found.low == pytest.approx(found.high, abs=1e-6)
    assert found.speed_up(16) == pytest.approx(by_law(fraction, 16))


def test_the_interval_holds_the_truth_about_nineteen_times_in_twenty():
    held = 0
    for seed in range(300):
        noise = random.Random(seed)
        points = [Measured(n, 10 * by_law(0.95, n) * noise.gauss(1, 0.01)) for n in (1, 2, 4, 8, 16)]
        found = amdahl(points)
        held += found.low <= 0.95 <= found.high
    assert 270 <= held <= 297


def test_errors_of_measurements_give_an_interval_to_two_of_them():
    none = amdahl([Measured(1, 100.0), Measured(8, 650.0)])
    some = amdahl([Measured(1, 100.0, 1.0), Measured(8, 650.0, 6.5)])
    more = amdahl([Measured(1, 100.0, 2.0), Measured(8, 650.0, 13.0)])
    assert none.low is None
    assert "two numbers of GPUs" in none.basis
    assert 0 < some.high - some.low < more.high - more.low


def test_faster_than_ideal_has_no_fraction_and_says_what_is_likely():
    disturbed = [Measured(1, 100.0), Measured(2, 722.0)]
    assert amdahl(disturbed) is None
    assert outside_the_law(disturbed) == (
        "2 are 7.22 times as fast as 1: faster than ideal, which the law cannot give; the measurement on 1 was likely "
        "disturbed: repeat it"
    )
    assert "caches fit" in outside_the_law([Measured(1, 100.0), Measured(2, 204.0)])


@pytest.mark.parametrize("slower", [[(1, 100.0), (2, 80.0)], [(2, 100.0), (4, 20.0)]])
def test_what_is_slower_with_more_gpus_has_no_fraction(slower):
    points = [Measured(gpus, rate) for gpus, rate in slower]
    assert amdahl(points) is None
    assert "more of them are slower" in outside_the_law(points)


def test_inside_the_law_there_is_nothing_to_explain_and_no_interval_goes_beyond_one():
    points = [Measured(1, 100.0, 5.0), Measured(2, 199.0, 5.0)]
    assert outside_the_law(points) is None
    assert outside_the_law(points[:1]) is None
    assert amdahl(points).high == 1.0


def test_one_number_of_gpus_is_no_law():
    assert amdahl([Measured(4, 100.0), Measured(4, 101.0)]) is None
    assert amdahl([]) is None
