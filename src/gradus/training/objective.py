"""Objective: how a model is called with a batch, and how its answer becomes a sum of losses and a count.

Sums and counts, not means: they add up over micro-batches and ranks, so that the mean is over the global batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradus.models.layers import widened
from gradus.models.output import IGNORED, LossOutput, classification_loss
from gradus.schema.callables import import_callable, is_import_path
from gradus.schema.errors import InputError, unknown_name
from gradus.schema.recipe import Named, Recipe

Batch = Mapping[str, Any] | tuple[Any, ...]
Function = Callable[..., Any]


class Losses(NamedTuple):
    """Over the valid tokens or samples of one micro-batch, on the device."""

    loss_sum: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    metrics: dict[str, tuple[Tensor, Tensor]]  # name: (sum, count); only in evaluation


class Objective:
    """The recipe's `loss` and `metrics`, ready to be applied to a model and a batch."""

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        self._loss = _named_loss(recipe.loss) if recipe.loss else None
        self._metrics = {name.rpartition(":")[2]: _named_metric(name) for name in recipe.metrics}
        self._signature = inspect.signature(model.forward)
        self._accepted = _keywords(self._signature) if self._loss else None

    def check_metric(self, name: str, reference_model: bool) -> None:
        """Refuse, before training, a metric that no evaluation will have. Reference models know their accuracy."""
        known = {"loss", *self._metrics} | ({"accuracy"} if reference_model and self._loss is None else set())
        if name not in known:
            raise unknown_name("metric", name, known, field="evaluate.metric", hint="name it in `metrics` as well")

    def __call__(self, model: nn.Module, batch: Batch, samples: int) -> Losses:
        """`samples` is the number of real samples; with none, the batch is padding and weighs nothing."""
        output = self._output(model, batch)
        result = self._loss(output, batch) if self._loss else output
        loss_sum, count = _sum_and_count(result, samples, with_loss=self._loss is not None)
        metrics = {} if model.training else self._measured(output, batch, samples)
        if samples == 0:
            loss_sum, count = loss_sum * 0, count * 0
            metrics = {name: (total * 0, number * 0) for name, (total, number) in metrics.items()}
        return Losses(loss_sum, count, metrics)

    def _output(self, model: nn.Module, batch: Batch) -> Any:
        if isinstance(batch, Mapping):
            chosen = batch if self._accepted is None else {k: v for k, v in batch.items() if k in self._accepted}
            positional, named = (), dict(chosen)
        else:
            positional, named = tuple(batch[:-1] if self._loss else batch), {}
        try:
            return model(*positional, **named)
        except TypeError as error:
            self._explain_mismatch(error, positional, named, batch)
            raise

    def _explain_mismatch(
        self, error: TypeError, positional: tuple[Any, ...], named: dict[str, Any], batch: Batch
    ) -> None:
        """If the batch does not fit the model's forward at all, say so in terms of the recipe."""
        try:
            self._signature.bind(*positional, **named)
        except TypeError:
            found = f"keys {sorted(batch)}" if isinstance(batch, Mapping) else f"a tuple of {len(batch)}"
            hint = (
                "with a `loss`, a tuple's last element is the target and a dict's keys are matched with forward's names"
            )
            if self._loss is None:
                hint = "without `loss`, the whole batch goes to the model; name one, for example `loss: cross-entropy`"
            raise InputError(
                f"model: forward{self._signature} does not take what the data gives: {found} ({error})",
                hint=hint,
                field="model.use",
            ) from error

    def _measured(self, output: Any, batch: Batch, samples: int) -> dict[str, tuple[Tensor, Tensor]]:
        measured = {}
        if isinstance(output, LossOutput) and output.correct is not None:
            measured["accuracy"] = (output.correct, output.count)
        for name, metric in self._metrics.items():
            if name not in measured:
                measured[name] = _sum_and_count(metric(output, batch), samples, with_loss=True, what=f"metric {name}")
        return measured


def _sum_and_count(result: Any, samples: int, *, with_loss: bool, what: str = "the loss") -> tuple[Tensor, Tensor]:
    if isinstance(result, LossOutput):
        return result.loss_sum, result.count
    if with_loss and isinstance(result, tuple) and len(result) == 2:
        total, count = result
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise _not_a_loss(total, total, with_loss, f"{what}, as (sum, count)")
        return widened(total.reshape(())), _on_device(count, total)
    mean = result
    if not isinstance(mean, Tensor):
        mean = _part(result, "loss")
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        raise _not_a_loss(result, mean, with_loss, what)
    return widened(mean.reshape(())) * samples, _on_device(samples, mean)


def _on_device(count: Any, like: Tensor) -> Tensor:
    # A number is filled in: copying it from the host would wait for the device.
    if isinstance(count, Tensor):
        return count.to(like.device, torch.float32)
    return torch.full((), float(count), device=like.device, dtype=torch.float32)


def _not_a_loss(result: Any, mean: Any, with_loss: bool, what: str) -> InputError:
    if isinstance(mean, Tensor):
        found = f"a tensor of shape {tuple(mean.shape)}"
    else:
        found = f"{type(result).__name__} without a `loss`"
    if with_loss:
        allowed = "a scalar mean, or (sum, count)"
        hint = "reduce it, for example with .mean(), or return (values.sum(), values.numel())"
    else:
        allowed = "a scalar loss, or something that has it as .loss"
        hint = "the model returns no loss: name one in the recipe, for example `loss: cross-entropy`"
    return InputError(f"{what}: found {found}, allowed: {allowed}", hint=hint, field="loss")


def _keywords(forward: inspect.Signature) -> frozenset[str] | None:
    """The names that the model's forward takes, or None when it takes any."""
    parameters = forward.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters)


def _named_loss(block: Named) -> Function:
    if is_import_path(block.use):
        function = import_callable(block.use, "loss")
        if isinstance(function, type):
            return function(**block.options)  # type: ignore[no-any-return]
        return lambda output, batch: function(output, batch, **block.options)
    if block.use == "cross-entropy":
        return _cross_entropy
    return _mean_squared_error


def _named_metric(name: str) -> Function:
    return import_callable(name, "metrics") if is_import_path(name) else _accuracy


def _cross_entropy(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = _target(batch)
    result = classification_loss(_classes_last(_logits(output), targets), targets, training=True)
    return result.loss_sum, result.count


def _mean_squared_error(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    predicted, target = _logits(output), _target(batch)
    if [n for n in predicted.shape if n != 1] != [n for n in target.shape if n != 1]:
        raise InputError(
            f"loss: mse of an output of shape {tuple(predicted.shape)} and a target of shape {tuple(target.shape)}, "
            "allowed: equal shapes, apart from dimensions of 1",
            field="loss",
        )
    squares = (predicted - target.reshape(predicted.shape).to(predicted.dtype)) ** 2
    return squares.sum(), _on_device(squares.numel(), squares)


def _accuracy(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = _target(batch)
    right = (_classes_last(_logits(output), targets).argmax(-1) == targets) & (targets != IGNORED)
    return right.sum(), (targets != IGNORED).sum()


def _classes_last(logits: Tensor, targets: Tensor) -> Tensor:
    """torch's own layout for images and sequences has the classes second."""
    return logits if logits.shape[:-1] == targets.shape else logits.movedim(1, -1)


def _logits(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else _part(output, "logits")
    if not isinstance(logits, Tensor):
        raise InputError(
            f"loss: the model returned {type(output).__name__}, allowed: a tensor, or something with .logits",
            field="loss",
        )
    return logits


def _part(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _target(batch: Batch) -> Tensor:
    if not isinstance(batch, Mapping):
        target = batch[-1]
    else:
        target = next((batch[name] for name in ("labels", "targets", "target", "label") if name in batch), None)
    if not isinstance(target, Tensor):
        keys = sorted(batch) if isinstance(batch, Mapping) else f"a tuple of {len(batch)}"
        raise InputError(
            f"loss: no target in the batch: found {keys}, allowed: a key named labels or targets", field="loss"
        )
    return target
