"""Spikes: found where a loss jumps up and stays, and never in the noise of a loss that is well."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from gradus.faults.numerics import StepData
from gradus.faults.spikes import SpikeWatch, deviations_above, spiked
from gradus.schema.recipe import SpikeBlock

Curve = NDArray[np.float64]
SETTINGS = SpikeBlock()
STEPS = 2000
SEEDS = range(3)


def found(losses: Curve, settings: SpikeBlock = SETTINGS) -> list[int]:
    """The steps at which a spike was told."""
    watch = SpikeWatch()
    return [step for step, loss in enumerate(losses) if watch.judge(float(loss), settings) is not None]


def power_law(steps: int = STEPS) -> Curve:
    """As the loss of language models falls with what they have seen (Kaplan et al. 2020, arXiv:2001.08361, eq. 1.4)."""
    seen = np.arange(1, steps + 1, dtype=np.float64)
    return 1.7 + 9.2 * seen**-0.4


def exponential(steps: int = STEPS) -> Curve:
    return 0.2 + 2.1 * np.exp(-np.arange(steps) / (steps / 5))


def warm_up(steps: int = STEPS) -> Curve:
    """A GPT from its start: near ln(50257) while the rate is small, then a steep fall."""
    at = np.arange(steps)
    return 3.2 + (math.log(50257) - 3.2) / (1 + np.exp((at - 120) / 25))


def epochs(steps: int = STEPS) -> Curve:
    """What is learnt by heart shows as a drop at each border of an epoch."""
    return 2.5 * 0.8 ** (np.arange(steps) // 400) + 0.02


def learnt_by_heart(steps: int = STEPS) -> Curve:
    """Down to where hardly anything is left."""
    return np.maximum(2.3 * np.exp(-np.arange(steps) / 150), 1e-5)


SHAPES: list[Callable[[], Curve]] = [power_law, exponential, warm_up, epochs, learnt_by_heart]


def normal(random: np.random.Generator, curve: Curve) -> Curve:
    return curve * (1 + 0.03 * random.standard_normal(len(curve)))


def heavy_tails(random: np.random.Generator, curve: Curve) -> Curve:
    """Small batches with some hard samples: Student's t with three degrees of freedom."""
    return curve * np.exp(0.1 * random.standard_t(3, len(curve)))


def mostly_easy(random: np.random.Generator, curve: Curve) -> Curve:
    """A classifier near its end: most batches cost next to nothing, some a lot."""
    return curve * np.exp(1.5 * random.standard_normal(len(curve)))


def in_bf16(random: np.random.Generator, curve: Curve) -> Curve:
    """Losses of so few bits that most of a window are one and the same number."""
    noisy = (curve * (1 + 0.002 * random.standard_normal(len(curve)))).astype(np.float32)
    return (noisy.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


NOISES = [normal, heavy_tails, mostly_easy, in_bf16]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_loss_that_is_well_has_none(
    shape: Callable[[], Curve], noise: Callable[[np.random.Generator, Curve], Curve]
) -> None:
    for seed in SEEDS:
        assert found(noise(np.random.default_rng(seed), shape())) == []


@pytest.mark.parametrize("rise", [1.5, 2.0, 30.0])
@pytest.mark.parametrize("shape", [power_law, exponential])
def test_a_jump_that_stays_is_told_at_its_third_step_and_once(shape: Callable[[], Curve], rise: float) -> None:
    """As published spikes look: up within a few steps, and down again over tens (PaLM, arXiv:2204.02311, 5.1)."""
    for seed in SEEDS:
        losses = normal(np.random.default_rng(seed), shape())
        lasts = np.arange(60)
        losses[1500:1560] *= 1 + (rise - 1) * np.exp(-lasts / 20)
        assert found(losses) == [1502]


def test_one_hard_batch_is_none_however_hard() -> None:
    losses = normal(np.random.default_rng(1), power_law())
    losses[[1000, 1400, 1401, 1900]] *= 40
    assert found(losses) == []


def test_a_loss_that_may_be_negative_is_compared_as_it_is() -> None:
    random = np.random.default_rng(2)
    losses = -5 + 0.1 * random.standard_normal(STEPS)
    assert found(losses) == []
    losses[1500:1510] += 3
    assert found(losses) == [1502]


def test_a_constant_loss_has_no_noise_to_compare_with_and_must_rise_by_a_tenth() -> None:
    losses = np.full(STEPS, 2.0)
    losses[1000:] = 2.1
    assert found(losses) == []
    losses[1500:] = 2.5
    assert found(losses) == [1502]


def test_it_goes_on_from_a_checkpoint_as_if_it_had_not_stopped() -> None:
    losses = normal(np.random.default_rng(3), power_law())
    losses[1500:1550] *= 1.5
    watch = SpikeWatch()
    for loss in losses[:1501]:
        watch.judge(float(loss), SETTINGS)
    resumed = SpikeWatch(recent=list(watch.recent), above=list(watch.above))
    assert resumed.above, "in the middle of one"
    assert resumed.judge(float(losses[1501]), SETTINGS) is None
    assert resumed.judge(float(losses[1502]), SETTINGS) is not None


def test_what_is_told_has_the_factor_and_the_samples() -> None:
    watch = SpikeWatch(recent=[2.0, 2.1, 1.9, 2.05] * 32)
    spikes = [watch.judge(loss, SETTINGS) for loss in (3.0, 3.1, 2.9)]
    assert spikes[2] is not None
    assert spikes[2].factor == pytest.approx(deviations_above(2.9, [2.0, 2.1, 1.9, 2.05] * 32))
    error = spiked(spikes[2], 41, 43, StepData(range(160, 172), [7] * 12), 40)
    assert error.details["factor"] > SETTINGS.factor
    assert "jumped to 2.9 and stayed there in steps 41 to 43" in error.message
    assert error.details["sample_indices"] == [7] * 12
