"""Learning rate as a pure function of the number of optimizer steps done."""

from __future__ import annotations

import math
from collections.abc import Callable

from gradus.schema.callables import import_callable, is_import_path
from gradus.schema.recipe import OptimizerBlock

Schedule = Callable[[int], float]


def scaled_peak(block: OptimizerBlock, batch: int) -> tuple[float, str | None]:
    """The peak learning rate for this batch, and a sentence that says how it was derived from the recipe's."""
    if block.lr_scaling == "none" or block.lr_batch is None:
        return block.lr, None
    ratio = batch / block.lr_batch
    factor = ratio if block.lr_scaling == "linear" else math.sqrt(ratio)
    peak = block.lr * factor
    formula = f"{block.lr:g} × {'' if block.lr_scaling == 'linear' else '√'}({batch}/{block.lr_batch})"
    return peak, f"learning rate {formula} = {peak:g} ({block.lr_scaling} scaling with the batch)"


def learning_rate(block: OptimizerBlock, batch: int, total_steps: int) -> Schedule:
    """Warm-up from near 0 over the first steps, then the decay that the recipe names."""
    peak, _ = scaled_peak(block, batch)
    decay = _decay(block, max(1, total_steps - block.warmup))

    def rate(step: int) -> float:
        if step < block.warmup:
            return peak * (step + 1) / block.warmup
        return peak * decay(step - block.warmup)

    return rate


def _decay(block: OptimizerBlock, steps: int) -> Schedule:
    """The fraction of the peak, `done` steps after the warm-up, of `steps` in all."""
    floor = block.decay_to

    def progress(done: int) -> float:
        return min(1.0, done / steps)

    if is_import_path(block.decay):
        function = import_callable(block.decay, "optimizer.decay")
        return lambda done: float(function(progress(done)))
    if block.decay == "linear":
        return lambda done: floor + (1 - floor) * (1 - progress(done))
    if block.decay == "cosine":
        return lambda done: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress(done)))
    if block.decay == "step":
        every = block.decay_every
        assert every is not None, "the recipe was checked"
        return lambda done: block.decay_factor ** (done // every)
    return lambda done: 1.0
