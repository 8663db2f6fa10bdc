"""The loss that an own loop gives to `run.step`, and what is said about one that cannot be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from gradus.schema.errors import InputError
from gradus.training.sum_and_count import sum_and_count

_SECOND_BACKWARD = "backward through the graph a second time"


def own_sum_and_count(loss: Any, samples: int, context: int) -> tuple[Tensor, Tensor]:
    loss_sum, count = sum_and_count(loss, samples, with_loss=True, what="run.step", context=context)
    if not loss_sum.requires_grad:
        raise InputError(
            "run.step: no gradient can flow from this loss",
            hint="compute it from the output of the prepared model, without .item(), .detach() or torch.no_grad()",
            field="step",
        )
    return loss_sum, count


@contextmanager
def backward_explained() -> Iterator[None]:
    """Inside is the backward pass of `run.step`, which a script that kept its own has run already."""
    try:
        yield
    except RuntimeError as error:
        if _SECOND_BACKWARD not in str(error):
            raise
        raise InputError(
            "run.step: backward has already gone through the graph of this loss",
            hint="leave out loss.backward(), optimizer.step() and optimizer.zero_grad(): run.step does all three; if "
            "they are not there, .detach() what the loss uses of an earlier batch, such as a hidden state",
            field="step",
        ) from None
