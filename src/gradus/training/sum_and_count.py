"""Sum and count: what a loss, a metric or a model answered, as a sum and the number of tokens or samples it is over.

A scalar is taken for the mean over the samples of a micro-batch. What else may come is refused with what was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradus.models.layers import widened
from gradus.models.output import LossOutput
from gradus.schema.errors import InputError


def sum_and_count(
    result: Any, samples: int, *, with_loss: bool, what: str = "the loss", context: int = 1
) -> tuple[Tensor, Tensor]:
    """What a loss or a model answered, as a sum and the number of tokens or samples that it is over.

    Where `context` ranks share the tokens of a sequence, a mean does not say what it is over, and is refused: on all of
    them alike, since it is what the code returns and not what is in the batch.
    """
    if isinstance(result, LossOutput):
        return result.loss_sum, result.count
    if with_loss and isinstance(result, tuple) and len(result) == 2:
        total, count = result
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise _not_a_loss(total, total, with_loss, f"{what}, as (sum, count)")
        if not _may_be_count(count):
            raise _not_a_count(count, what)
        return widened(total.reshape(())), on_device(count, total)
    mean = result
    if not isinstance(mean, Tensor):
        mean = part(result, "loss")
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        raise _not_a_loss(result, mean, with_loss, what)
    if context > 1:
        raise _mean_of_a_part(what, context, with_loss)
    return widened(mean.reshape(())) * samples, on_device(samples, mean)


def on_device(count: Any, like: Tensor) -> Tensor:
    """A count as a tensor beside the sum that it belongs to."""
    # A number is filled in: copying it from the host would wait for the device.
    if isinstance(count, Tensor):
        return count.reshape(()).to(like.device, torch.float32)
    return torch.full((), float(count), device=like.device, dtype=torch.float32)


def _may_be_count(count: Any) -> bool:
    """As far as can be told without waiting for the device."""
    if isinstance(count, Tensor):
        return count.numel() == 1 and not count.requires_grad and not count.is_complex()
    return isinstance(count, (int, float)) and not isinstance(count, bool) and 0 <= count < math.inf


def _not_a_count(count: Any, what: str) -> InputError:
    hint = "the count is what the sum is to be divided by, over all ranks: the number of valid tokens or samples"
    if isinstance(count, Tensor):
        found = f"a tensor of shape {tuple(count.shape)}"
        if count.requires_grad:
            found += " with a gradient"
            hint = "(sum, count) means a sum of losses and how many; add the two losses up yourself"
    else:
        found = repr(count) if isinstance(count, (int, float)) else type(count).__name__
    return InputError(
        f"{what}, as (sum, count): found a count that is {found}, allowed: a number of at least 0, or a tensor of one "
        "element without a gradient",
        hint=hint,
        field="metrics" if what.startswith("metric") else "loss",
    )


def _not_a_loss(result: Any, mean: Any, with_loss: bool, what: str) -> InputError:
    metric = what.startswith("metric")
    if isinstance(mean, Tensor):
        found = f"a tensor of shape {tuple(mean.shape)}"
    elif isinstance(result, (int, float, str)) or result is None:
        found = "None" if result is None else f"{result!r}, a Python {type(result).__name__}"
    else:
        found = type(result).__name__ + ("" if metric else " without a `loss`")
    if with_loss:
        allowed = "a scalar mean, or (sum, count)"
        hint = "reduce it, for example with .mean(), or return (values.sum(), values.numel())"
        if isinstance(result, float):
            hint = "return the tensor itself: after .item() or float(), no gradient can reach the model"
        elif result is None:
            hint = "is a `return` missing?"
    else:
        allowed = "a scalar loss, or something that has it as .loss"
        hint = "the model returns no loss: name one in the recipe, for example `loss: cross-entropy`"
        if isinstance(result, (tuple, list)):
            hint = "let forward return the loss alone, or a dict with `loss`: of a tuple nobody knows which part it is"
        elif part(result, "logits") is not None:
            hint += ", or give it `labels` in the batch"
    field = "metrics" if metric else "loss"
    return InputError(f"{what}: found {found}, allowed: {allowed}", hint=hint, field=field)


def _mean_of_a_part(what: str, context: int, with_loss: bool) -> InputError:
    hint = "return the sum over valid tokens and their number"
    if not with_loss:
        hint = "let the model return its output, and name a `loss` that returns (sum, count), such as cross-entropy"
    return InputError(
        f"{what}: found a mean over a rank's part of the sequences (plan.mesh.context {context}), allowed: (sum, count)"
        ", since parts need not have equally many valid tokens",
        hint=f"{hint}; or use plan.mesh.context=1",
        field="loss",
        found="a mean",
        allowed="(sum, count)",
    )


def part(output: Any, name: str) -> Any:
    """An entry of a mapping, or an attribute; None where there is no such thing."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
