"""The scaling law: known laws are found again, and runs that do not allow one are refused with a reason."""

from __future__ import annotations

import random

import pytest

from gradus.diagnosis.scaling_law import Refused, ScalingLaw, fit_scaling_law

SIZES = [1e6, 4e6, 1.6e7, 6.4e7, 2.5e8, 1e9]


def losses(floor: float = 1.69, factor: float = 406.4, exponent: float = 0.34, noise: float = 0.0) -> list[float]:
    source = random.Random(3)
    return [floor + factor * size**-exponent + source.gauss(0, noise) for size in SIZES]


@pytest.mark.parametrize(("floor", "factor", "exponent"), [(1.69, 406.4, 0.34), (0.0, 8.0, 0.05), (2.5, 5e4, 0.8)])
def test_a_law_without_noise_is_found_again(floor, factor, exponent):
    law = fit_scaling_law(SIZES, losses(floor, factor, exponent), "parameters")
    assert isinstance(law, ScalingLaw)
    assert law.exponent == pytest.approx(exponent, rel=1e-3)
    assert law.floor == pytest.approx(floor, abs=2e-3)
    assert law.loss(1e8) == pytest.approx(floor + factor * 1e8**-exponent, rel=1e-3)


def test_with_noise_the_interval_holds_the_truth_and_is_no_point():
    law = fit_scaling_law(SIZES, losses(noise=0.01), "parameters")
    assert law.exponent_interval.low < 0.34 < law.exponent_interval.high
    assert law.floor_interval.low < 1.69 < law.floor_interval.high
    assert law.exponent_interval.high - law.exponent_interval.low > 0.005
    assert "over parameters" in law.text()


@pytest.mark.parametrize(
    ("sizes", "values", "reason"),
    [
        ([1e6, 4e6, 1e8], [3, 2.5, 2], "3 different sizes"),
        ([1e6, 1e6, 1e6, 4e6], [3, 3, 3, 2], "2 different sizes"),
        ([1e6, 1.2e6, 1.4e6, 2e6], [3, 2.9, 2.8, 2.7], "only 2.0 times"),
        (SIZES, [2, 2.1, 2.2, 2.3, 2.4, 2.5], "does not fall"),
        (SIZES, [3, 2, float("nan"), 1, 1, 1], "not a positive number"),
    ],
)
def test_runs_that_allow_no_law_are_refused_with_the_reason(sizes, values, reason):
    refused = fit_scaling_law(sizes, values, "parameters")
    assert isinstance(refused, Refused)
    assert reason in refused.reason


def test_several_runs_of_one_size_are_fine():
    law = fit_scaling_law([*SIZES, *SIZES], [*losses(), *losses()], "tokens")
    assert law.exponent == pytest.approx(0.34, rel=1e-3)
