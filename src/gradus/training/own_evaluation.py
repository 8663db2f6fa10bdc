"""Own evaluation: what a loop of the user's own measures on validation samples, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from gradus.faults.signals import Signals
from gradus.training.evaluation import Measure
from gradus.training.objective import Losses
from gradus.training.sum_and_count import sum_and_count


class Results(dict[str, float]):
    """Means over the validation samples. Of an evaluation that a stop request cut short, every number is NaN."""

    def __missing__(self, key: str) -> float:
        if self:
            raise KeyError(key)
        return float("nan")


def measure_of(loss: Callable[[Any], Any], signals: Signals | None, context: int) -> Measure:
    """How a batch is measured by a function of the script's, which may return several numbers."""

    def measured(model: nn.Module, batch: Any, samples: int) -> Losses:
        if signals is not None:
            signals.answer()
        result = loss(batch)
        # The output of a Hugging Face model is a mapping as well, but has its loss as an attribute.
        several = isinstance(result, Mapping) and "loss" in result and not hasattr(result, "loss")
        parts = dict(result) if several else {"loss": result}
        pairs: dict[str, tuple[Tensor, Tensor]] = {
            name: sum_and_count(
                value,
                samples,
                with_loss=True,
                what=f"run.evaluate: {name}",
                context=context if name == "loss" else 1,
            )
            for name, value in parts.items()
        }
        if samples == 0:
            pairs = {name: (total * 0, count * 0) for name, (total, count) in pairs.items()}
        loss_sum, count = pairs.pop("loss")
        return Losses(loss_sum, count, pairs)

    return measured
