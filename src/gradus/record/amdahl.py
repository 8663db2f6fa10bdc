"""Amdahl: what more GPUs brought, and the share of the work that they can share.

By Amdahl's law a step on n GPUs takes T·((1 − f) + f/n): f is the share that is split over them. A speed-up of 6.5 on 8
GPUs is f = 0.967, and no number of GPUs would then give more than 1/(1 − f) = 30 times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond, the normal distribution's.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL = 1.960
_ROUNDING = 1e-9  # of the fraction: an ideal speed-up that was computed is not faster than ideal
_FEW_PER_CENT = 1.05  # times the ideal: so much can caches give, into which a smaller share of the work fits


@dataclass(frozen=True)
class Measured:
    """The rate (samples or tokens in a second) on so many GPUs, with its standard error where that is known."""

    gpus: int
    rate: float
    error: float | None = None

    def __post_init__(self) -> None:
        assert self.gpus >= 1, self.gpus
        assert self.rate > 0, self.rate


@dataclass(frozen=True)
class Amdahl:
    """The fraction that is split, with its 95 % interval where one follows from the measurements."""

    fraction: float
    low: float | None
    high: float | None
    basis: str  # what the interval rests on, or why there is none

    @property
    def limit(self) -> float | None:
        """The speed-up that no number of GPUs exceeds; None where there is no limit in sight."""
        return 1 / (1 - self.fraction) if self.fraction < 1 else None

    def speed_up(self, gpus: float) -> float:
        """Over one GPU, as the law has it."""
        return 1 / ((1 - self.fraction) + self.fraction / gpus)

    def text(self) -> str:
        interval = f" ({self.low:.3f} to {self.high:.3f})" if self.low is not None and self.high is not None else ""
        return f"{self.fraction:.3f}{interval}"


def speed_up(measured: Measured, baseline: Measured) -> float:
    """How many times as fast as the baseline."""
    return measured.rate / baseline.rate


def efficiency(measured: Measured, baseline: Measured) -> float:
    """The speed-up as a share of what the additional GPUs could bring at most, if nothing were lost."""
    return speed_up(measured, baseline) * baseline.gpus / measured.gpus


def fraction_of(times: float, gpus: float) -> float:
    """Of one speed-up on so many times as many GPUs."""
    assert gpus > 1, gpus
    return (1 - 1 / times) / (1 - 1 / gpus)


def outside_the_law(points: Sequence[Measured]) -> str | None:
    """Why measurements on several numbers of GPUs have no fraction, in a sentence; None where they have one."""
    if len({point.gpus for point in points}) < 2 or amdahl(points) is not None:
        return None
    pairs = [(few, many) for few in points for many in points if few.gpus < many.gpus]
    few, many = max(pairs, key=lambda pair: efficiency(pair[1], pair[0]))
    times, share = speed_up(many, few), efficiency(many, few)
    if share <= 1:
        slow_few, slow_many = min(pairs, key=lambda pair: speed_up(pair[1], pair[0]))
        return (
            f"{slow_many.gpus} are {speed_up(slow_many, slow_few):.2f} times as fast as {slow_few.gpus}: more of them "
            "are slower, and the law has no such fraction"
        )
    told = f"{many.gpus} are {times:.2f} times as fast as {few.gpus}: faster than ideal, which the law cannot give"
    if share <= _FEW_PER_CENT:
        return f"{told}; by a few per cent, as when caches fit, or by noise"
    return f"{told}; the measurement on {few.gpus} was likely disturbed: repeat it"


def amdahl(points: Sequence[Measured]) -> Amdahl | None:
    """The law through measurements on at least two numbers of GPUs; None where there are not as many.

    None as well where no law goes through them: faster than ideal, or slower with more (`outside_the_law` tells).

    Least squares of the time against 1/n, each weighted by its own size, so that the small times of many GPUs count as
    much as the large one of a single GPU.
    """
    if len({point.gpus for point in points}) < 2:
        return None
    times = [1 / point.rate for point in points]
    # Rows of the weighted problem: (a + b/n)/t = 1.
    rows = [(1 / time, 1 / (point.gpus * time)) for point, time in zip(points, times, strict=True)]
    aa = sum(u * u for u, _ in rows)
    ab = sum(u * v for u, v in rows)
    bb = sum(v * v for _, v in rows)
    determinant = aa * bb - ab * ab
    ra, rb = sum(u for u, _ in rows), sum(v for _, v in rows)
    a, b = (bb * ra - ab * rb) / determinant, (aa * rb - ab * ra) / determinant
    if min(a, b) < -_ROUNDING * abs(a + b):
        return None
    fraction = b / (a + b)
    slope = (-b / (a + b) ** 2, a / (a + b) ** 2)  # of the fraction, by a and by b
    variance_of_one = (slope[0] ** 2 * bb - 2 * slope[0] * slope[1] * ab + slope[1] ** 2 * aa) / determinant
    freedom = len(points) - 2
    halves = []
    if freedom > 0:
        scatter = sum((1 - u * a - v * b) ** 2 for u, v in rows) / freedom
        quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL
        halves.append(("how far the measurements are from the law", quantile * math.sqrt(variance_of_one * scatter)))
    errors = [point.error / point.rate if point.error is not None else None for point in points]
    known = [error for error in errors if error is not None]
    if len(known) == len(points):
        # The weight of each measurement in the fraction, times its own relative error.
        effects = [
            (slope[0] * (bb * u - ab * v) + slope[1] * (aa * v - ab * u)) / determinant * error
            for (u, v), error in zip(rows, known, strict=True)
        ]
        halves.append(("the scatter of each measurement", _NORMAL * math.sqrt(sum(effect**2 for effect in effects))))
    if not halves:
        why = "no interval: two numbers of GPUs fix the law exactly, and the measurements have no error of their own"
        return Amdahl(fraction, None, None, why)
    basis, half = max(halves, key=lambda one: one[1])
    return Amdahl(fraction, max(0.0, fraction - half), min(1.0, fraction + half), f"95 % interval by {basis}")
