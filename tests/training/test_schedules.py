"""Learning rates: exact values at the corners of each schedule, and what the scaling rules say they did."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gradus.schema.recipe import OptimizerBlock
from gradus.training.schedules import Schedule, learning_rate, scaled_peak

PEAK = 0.4
TOTAL = 100


def schedule(total: int = TOTAL, batch: int = 32, **keys: Any) -> Schedule:
    return learning_rate(OptimizerBlock(lr=PEAK, **keys), batch, total)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_warm_up_rises_in_equal_steps_to_the_peak(decay: str) -> None:
    rate = schedule(warmup=4, decay=decay)
    assert [rate(step) for step in range(5)] == [0.1, 0.2, pytest.approx(0.3), 0.4, 0.4]


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert schedule(decay="linear")(0) == PEAK


def test_constant_stays_at_the_peak_for_ever() -> None:
    rate = schedule(warmup=10)
    assert {rate(step) for step in range(10, 3 * TOTAL)} == {PEAK}


@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_linear_falls_evenly_to_its_floor_and_stays(floor: float) -> None:
    rate = schedule(warmup=20, decay="linear", decay_to=floor)
    assert rate(20) == PEAK
    assert rate(60) == pytest.approx(PEAK * (1 + floor) / 2, rel=1e-15)
    assert rate(TOTAL) == pytest.approx(PEAK * floor, abs=1e-17)
    assert rate(TOTAL + 50) == rate(TOTAL)
    falls = [rate(step) - rate(step + 1) for step in range(20, TOTAL)]
    assert max(falls) == pytest.approx(min(falls), rel=1e-9)


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_cosine_is_half_a_wave_from_the_peak_to_its_floor(floor: float) -> None:
    rate = schedule(warmup=20, decay="cosine", decay_to=floor)
    assert rate(20) == PEAK
    assert rate(60) == pytest.approx(PEAK * (1 + floor) / 2, rel=1e-15)
    quarter = floor + (1 - floor) * (1 + math.sqrt(0.5)) / 2
    assert rate(40) == pytest.approx(PEAK * quarter, rel=1e-15)
    assert rate(TOTAL) == pytest.approx(PEAK * floor, abs=1e-17)
    assert rate(TOTAL + 50) == rate(TOTAL)


def test_step_drops_after_every_so_many_steps_counted_from_the_end_of_warm_up() -> None:
    rate = schedule(warmup=5, decay="step", decay_every=30, decay_factor=0.5)
    assert [rate(step) for step in (5, 34, 35, 64, 65, 95)] == [PEAK, PEAK, PEAK / 2, PEAK / 2, PEAK / 4, PEAK / 8]


def test_a_callable_of_the_users_is_given_the_progress_from_0_to_1(tmp_path: Path) -> None:
    file = tmp_path / "decays.py"
    file.write_text("def square(progress):\n    return (1 - progress) ** 2\n")
    rate = schedule(warmup=20, decay=f"{file}:square")
    assert rate(9) == pytest.approx(PEAK / 2)
    assert [rate(step) for step in (20, 60, TOTAL, TOTAL + 1)] == [PEAK, PEAK / 4, 0.0, 0.0]


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_warm_up_longer_than_the_run_only_warms_up(decay: str) -> None:
    rate = schedule(total=10, warmup=20, decay=decay)
    assert [rate(step) for step in range(10)] == [pytest.approx(PEAK * (step + 1) / 20) for step in range(10)]


def test_linear_scaling_multiplies_by_the_ratio_of_batches_and_says_so() -> None:
    block = OptimizerBlock(lr=0.1, lr_scaling="linear", lr_batch=256)
    peak, sentence = scaled_peak(block, 1024)
    assert peak == 0.4
    assert sentence == "learning rate 0.1 × (1024/256) = 0.4 (linear scaling with the batch)"
    assert learning_rate(block, 1024, TOTAL)(0) == 0.4


def test_square_root_scaling_multiplies_by_the_root_of_the_ratio_and_says_so() -> None:
    block = OptimizerBlock(lr=0.1, lr_scaling="sqrt", lr_batch=256)
    peak, sentence = scaled_peak(block, 1024)
    assert peak == 0.2
    assert sentence == "learning rate 0.1 × √(1024/256) = 0.2 (sqrt scaling with the batch)"
    assert learning_rate(block, 64, TOTAL)(0) == 0.05


def test_without_scaling_the_batch_changes_nothing_and_nothing_is_said() -> None:
    assert scaled_peak(OptimizerBlock(lr=0.1), 4096) == (0.1, None)
