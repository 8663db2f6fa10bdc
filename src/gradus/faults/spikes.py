"""Spikes: a loss that jumps far above its recent past and stays there.

Losses are compared with the median of the last ones, in units of their median absolute deviation (MAD), so that a few
outliers among them change nothing; and as logarithms where all are positive, since the noise of a loss grows with it.
A single step is never a spike: a batch of hard samples gives one high loss, a run that goes wrong many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gradus.faults.numerics import StepData
from gradus.schema.errors import DoNotRestart
from gradus.schema.recipe import SpikeBlock

MAD_TO_DEVIATION = 1.4826  # of a normal distribution: 1 / its 75 % quantile (Rousseeuw and Croux 1993)


@dataclass(frozen=True)
class Spike:
    steps: int  # that it has lasted
    loss: float  # the last of them
    median: float  # of the losses before
    factor: float  # how far above the median the least of its losses is, in standard deviations of the losses before


@dataclass
class SpikeWatch:
    """The losses that the next one is compared with. It is kept in checkpoints, and goes back with them."""

    recent: list[float] = field(default_factory=list)
    above: list[float] = field(default_factory=list)  # the last ones, in a row, that are far above those

    def judge(self, loss: float, settings: SpikeBlock) -> Spike | None:
        """Take in the loss of a step. A spike is told once: from then on, what comes after it is the usual."""
        if len(self.recent) >= settings.window and _far_above(loss, self.recent, settings):
            self.above.append(loss)
            if len(self.above) < settings.steps:
                return None
            factor = deviations_above(min(self.above), self.recent)
            spike = Spike(len(self.above), loss, _middle(self.recent), factor)
            self.recent, self.above = [], []
            return spike
        # What was high and did not stay so was noise, and belongs to the usual.
        self.recent = [*self.recent, *self.above, loss][-settings.window :]
        self.above = []
        return None


def _far_above(loss: float, recent: list[float], settings: SpikeBlock) -> bool:
    middle = _middle(recent)
    rises = loss > middle + (settings.rise - 1) * abs(middle)  # first: it is the quicker answer, and mostly no
    return rises and deviations_above(loss, recent) > settings.factor


def deviations_above(loss: float, recent: list[float]) -> float:
    """How far a loss is above the median of recent ones, in standard deviations of theirs, robustly estimated."""
    if min(loss, *recent) > 0:
        loss, recent = math.log(loss), [math.log(value) for value in recent]
    median = _middle(recent)
    deviation = MAD_TO_DEVIATION * _middle([abs(value - median) for value in recent])
    if deviation == 0:
        return math.inf if loss > median else 0.0
    return (loss - median) / deviation


def _middle(values: list[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def spiked(spike: Spike, first: int, last: int, data: StepData, saved_step: int | None) -> DoNotRestart:
    """What is told of a spike of the steps `first` to `last` (from 1). As an error: where going back does not help."""
    factor = "infinitely many" if math.isinf(spike.factor) else f"{spike.factor:.1f}"
    return DoNotRestart(
        f"the loss jumped to {spike.loss:.6g} and stayed there in steps {first} to {last}; its median was "
        f"{spike.median:.6g} before, and it is {factor} standard deviations above that. Samples: {data.text}",
        hint="look at those samples; try a lower optimizer.lr, a longer optimizer.warmup or optimizer.clip=1.0; to go "
        "back and on without them by itself: on_spike=rollback",
        step=last,
        first_step=first,
        loss=spike.loss,
        median=spike.median,
        factor=spike.factor,
        checkpoint_step=saved_step,
        **data.fields,
    )
