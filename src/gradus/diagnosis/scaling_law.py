"""Scaling law: how the loss falls with the size of a model or of its data, L = E + A·N^−α."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEWEST_SIZES = 4  # three numbers are fitted: with three sizes any law goes through all of them
LEAST_SPAN = 4.0  # the largest size over the smallest
CONFIDENCE = 0.95
_RESAMPLES = 400
_LOWEST_ALPHA, _HIGHEST_ALPHA = 0.01, 3.0


@dataclass(frozen=True)
class Interval:
    """Where a fitted number lies with 95 % confidence, by the bootstrap."""

    low: float
    high: float


@dataclass(frozen=True)
class ScalingLaw:
    """The fitted numbers. `E` is the loss that no size goes below, as far as these runs tell."""

    over: str  # "parameters", "tokens" or "samples"
    floor: float
    factor: float
    exponent: float
    floor_interval: Interval
    exponent_interval: Interval
    residual: float  # root mean square distance of the losses from the law
    points: tuple[tuple[float, float], ...]

    def loss(self, size: float) -> float:
        return float(self.floor + self.factor * size**-self.exponent)

    def text(self) -> str:
        low, high = self.exponent_interval.low, self.exponent_interval.high
        bottom, top = self.floor_interval.low, self.floor_interval.high
        return (
            f"L = {self.floor:.3f} + {self.factor:.3g} · N^−{self.exponent:.3f} over {self.over}; "
            f"exponent {low:.3f} to {high:.3f}, floor {bottom:.3f} to {top:.3f} (95 %, bootstrap)"
        )


@dataclass(frozen=True)
class Refused:
    """Why there is no law."""

    reason: str


def fit_scaling_law(sizes: Sequence[float], losses: Sequence[float], over: str, seed: int = 1) -> ScalingLaw | Refused:
    """Least squares; several losses of one size are fine."""
    assert len(sizes) == len(losses), (len(sizes), len(losses))
    pairs = sorted(zip(sizes, losses, strict=True))
    if any(not math.isfinite(loss) or loss <= 0 or size <= 0 for size, loss in pairs):
        return Refused("a loss is not a positive number")
    distinct = sorted({size for size, _ in pairs})
    if len(distinct) < FEWEST_SIZES:
        return Refused(f"{len(distinct)} different sizes ({over}); a law of three numbers needs {FEWEST_SIZES} or more")
    if distinct[-1] < LEAST_SPAN * distinct[0]:
        span = distinct[-1] / distinct[0]
        return Refused(
            f"the largest size is only {span:.1f} times the smallest ({over}); {LEAST_SPAN:g} times are needed"
        )
    smallest = _mean([loss for size, loss in pairs if size == distinct[0]])
    largest = _mean([loss for size, loss in pairs if size == distinct[-1]])
    if largest >= smallest:
        return Refused(
            f"the loss does not fall with {over}: {smallest:.4g} at the smallest size, {largest:.4g} at the largest"
        )
    return _fitted(pairs, over, seed)


def _fitted(pairs: Sequence[tuple[float, float]], over: str, seed: int) -> ScalingLaw:
    import numpy

    sizes = numpy.array([size for size, _ in pairs])
    losses = numpy.array([loss for _, loss in pairs])
    # Relative to a middle size, so that the factor and the exponent are not confused by huge numbers.
    unit = float(numpy.exp(numpy.log(sizes).mean()))
    floor, factor, exponent = (float(value[0]) for value in _least_squares(sizes / unit, losses[None, :]))
    fitted = floor + factor * (sizes / unit) ** -exponent
    residuals = losses - fitted
    draws = numpy.random.default_rng(seed).integers(0, len(pairs), (_RESAMPLES, len(pairs)))
    # Residuals of a fit are too small by the numbers that were fitted.
    widened = residuals * math.sqrt(len(pairs) / max(1, len(pairs) - 3))
    floors, _, exponents = _least_squares(sizes / unit, fitted[None, :] + widened[draws])
    return ScalingLaw(
        over,
        floor,
        factor * unit**exponent,
        exponent,
        _interval(floors),
        _interval(exponents),
        float(numpy.sqrt((residuals**2).mean())),
        tuple((float(size), float(loss)) for size, loss in pairs),
    )


def _least_squares(sizes: NDArray[Any], losses: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Floor, factor and exponent for each row of losses. Given the exponent the rest is linear: only it is searched."""
    import numpy

    best = numpy.full(len(losses), 0.5)
    low, high = _LOWEST_ALPHA, _HIGHEST_ALPHA
    exponents = numpy.geomspace(low, high, 120)[None, :].repeat(len(losses), 0)
    floor = factor = best
    for _ in range(6):
        floor, factor, error = _linear(sizes, losses, exponents)
        at = error.argmin(1)
        rows = numpy.arange(len(losses))
        best, floor, factor = exponents[rows, at], floor[rows, at], factor[rows, at]
        before = exponents[rows, numpy.maximum(at - 1, 0)]
        after = exponents[rows, numpy.minimum(at + 1, exponents.shape[1] - 1)]
        exponents = numpy.linspace(before, after, 24, axis=1)
    return floor, factor, best


def _linear(
    sizes: NDArray[Any], losses: NDArray[Any], exponents: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Floor (not below zero), factor and squared error for each row of losses and each of its exponents."""
    import numpy

    power = sizes[None, None, :] ** -exponents[:, :, None]
    wanted = losses[:, None, :]
    mean_power, mean_loss = power.mean(2), wanted.mean(2)
    spread = ((power - mean_power[:, :, None]) ** 2).sum(2)
    together = ((power - mean_power[:, :, None]) * (wanted - mean_loss[:, :, None])).sum(2)
    factor = together / numpy.maximum(spread, 1e-300)
    floor = mean_loss - factor * mean_power
    # A loss cannot be negative: where the line says so, it goes through zero.
    through_zero = (power * wanted).sum(2) / (power**2).sum(2)
    factor = numpy.where(floor < 0, through_zero, factor)
    floor = numpy.maximum(floor, 0.0)
    error = ((wanted - floor[:, :, None] - factor[:, :, None] * power) ** 2).sum(2)
    return floor, factor, error


def _interval(values: NDArray[Any]) -> Interval:
    import numpy

    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = numpy.percentile(values, [tail, 100 - tail])
    return Interval(float(low), float(high))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
