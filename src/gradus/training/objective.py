"""Objective: how a model is called with a batch, and how its answer becomes a sum of losses and a count.

Sums and counts, not means: they add up over micro-batches and ranks, so that the mean is over the global batch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from gradus.models.huggingface_documents import require_apart
from gradus.models.layers import widened
from gradus.models.output import IGNORED, LossOutput, classification_loss
from gradus.schema.callables import import_callable, is_import_path
from gradus.schema.errors import GradusError, InputError, unknown_name
from gradus.schema.foreign import is_pretrained_model
from gradus.schema.recipe import Named, Recipe
from gradus.schema.user_code import raised_by_user
from gradus.training.chunked_loss import ChunkedLoss
from gradus.training.shape_errors import explain_forward_error
from gradus.training.sum_and_count import on_device, part, sum_and_count
from gradus.training.valid_labels import rule_for, shifted, valid_labels

Batch = Mapping[str, Any] | tuple[Any, ...]
Function = Callable[..., Any]

_CALLED = "is called {0}(output, batch): the target is batch[-1] of a tuple, or batch['labels'] of a dict"
# Of an output and a target in place of the batch, Python and torch complain in many ways.
_ABOUT_THE_CALL = re.compile(r"\b(tuple|dict)\b|positional argument|unexpected keyword argument")


class Losses(NamedTuple):
    """Over the valid tokens or samples of one micro-batch, on the device."""

    loss_sum: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    metrics: dict[str, tuple[Tensor, Tensor]]  # name: (sum, count); only in evaluation


class Objective:
    """The recipe's `loss` and `metrics`, ready to be applied to a model and a batch."""

    def __init__(self, recipe: Recipe, model: nn.Module, *, context: int = 1) -> None:
        self._recipe = recipe
        self._context = context  # ranks that share the tokens of a sequence
        self._loss = _named_loss(recipe.loss, model) if recipe.loss else None
        self._signature = inspect.signature(model.forward)
        self._accepted = _keywords(self._signature) if self._loss else None
        self._rule = None if self._loss else rule_for(model)
        self._config = getattr(model, "config", None)
        self._added = _keywords_to_add(model, self._signature)
        if recipe.data.packs and is_pretrained_model(type(model)):
            require_apart(model)
        self._metrics = {metric.title: self._named_metric(metric, model) for metric in recipe.metrics}

    @property
    def cross_entropy(self) -> bool:
        """Whether the loss is the built-in cross-entropy of what the model returns."""
        return self._loss is _cross_entropy

    @property
    def loss(self) -> str | None:
        """The name of the recipe's loss; None where the model computes its own."""
        return self._recipe.loss.use if self._recipe.loss else None

    def logits_of(self, output: Any) -> Tensor:
        """Of what the model returned, that which the loss is computed of."""
        return _logits(output)

    def use_chunks(self, layer: nn.Linear, chunked: ChunkedLoss) -> Callable[[], None]:
        """Compute the built-in cross-entropy in chunks; in training, the layer hands on what it is given.

        Returns what takes that back.
        """
        before, self._loss = self._loss, partial(_cross_entropy, layer=layer, chunked=chunked)
        return partial(setattr, self, "_loss", before)

    def check_metric(self, name: str, reference_model: bool) -> None:
        """Refuse, before training, a metric that no evaluation will have. Reference models know their accuracy."""
        known = {"loss", *self._metrics} | ({"accuracy"} if reference_model and self._loss is None else set())
        if name not in known:
            raise unknown_name("metric", name, known, field="evaluate.metric", hint="name it in `metrics` as well")

    def __call__(self, model: nn.Module, batch: Batch, samples: int) -> Losses:
        """`samples` is the number of real samples; with none, the batch is padding and weighs nothing."""
        output = self.answer(model, batch)
        loss_sum, count = self._lost(model, output, batch, samples)
        if not loss_sum.requires_grad and model.training and torch.is_grad_enabled():
            _check_gradient_can_flow(model, by_loss=self._loss is not None)
        metrics = {} if model.training else self._measured(model, output, batch, samples)
        if samples == 0:
            loss_sum, count = loss_sum * 0, count * 0
            metrics = {name: (total * 0, number * 0) for name, (total, number) in metrics.items()}
        return Losses(loss_sum, count, metrics)

    def answer(self, model: Function, batch: Batch) -> Any:
        """What the model returns for a batch, called as its forward and the recipe's `loss` want it."""
        if isinstance(batch, Mapping):
            chosen = batch if self._accepted is None else {k: v for k, v in batch.items() if k in self._accepted}
            positional, named = (), {**self._added, **chosen}
        else:
            positional, named = tuple(batch[:-1] if self._loss else batch), self._added
        try:
            return model(*positional, **named)
        except Exception as error:
            if isinstance(error, TypeError):
                self._explain_mismatch(error, positional, named, batch)
            _raise_explained(error, explain_forward_error(error, model, batch))

    def _lost(self, model: nn.Module, output: Any, batch: Batch, samples: int) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and the number of tokens or samples that it is over."""
        if self._loss is not None:
            try:
                result = self._loss(output, batch)
            except Exception as error:
                use = self._recipe.loss.use if self._recipe.loss else ""
                _raise_explained(error, _explained_call(error, model, output, batch, "loss", use))
            return sum_and_count(result, samples, with_loss=True, context=self._context)
        mean = None if self._rule is None or isinstance(output, LossOutput) else part(output, "loss")
        labels = None
        if self._rule is not None and isinstance(mean, Tensor) and mean.numel() == 1:
            labels = valid_labels(self._rule, self._config, batch, output)
        if labels is None or mean is None:
            return sum_and_count(output, samples, with_loss=False, context=self._context)
        mean, count = widened(mean.reshape(())), on_device(labels, mean)
        # The mean over no label at all is no number; the sum is zero.
        return torch.where(count > 0, mean * count.to(mean.dtype), torch.zeros_like(mean)), count

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

    def _measured(self, model: nn.Module, output: Any, batch: Batch, samples: int) -> dict[str, tuple[Tensor, Tensor]]:
        measured = {}
        if isinstance(output, LossOutput) and output.correct is not None:
            measured["accuracy"] = (output.correct, output.count)
        for name, metric in self._metrics.items():
            if name in measured:
                continue
            try:
                result = metric(output, batch)
            except Exception as error:
                use = next(block.use for block in self._recipe.metrics if block.title == name)
                _raise_explained(error, _explained_call(error, model, output, batch, "metrics", use))
            measured[name] = _metric_sum_and_count(name, result, samples, _device_of(batch))
        return measured

    def _named_metric(self, block: Named, model: nn.Module) -> Function:
        if is_import_path(block.use):
            return _users_function(block, "metrics", model)
        return partial(_accuracy, next_position=self._rule == "next position")


def _raise_explained(error: Exception, explained: Exception) -> NoReturn:
    if explained is error:
        raise error
    raise explained from error


def _explained_call(error: Exception, model: nn.Module, output: Any, batch: Batch, field: str, use: str) -> Exception:
    """An exception in a loss or a metric: shapes that do not fit, or anything else in one of the user's own."""
    users = is_import_path(use) and not use.startswith("torch.")
    about_the_call = isinstance(error, (TypeError, AttributeError)) and _ABOUT_THE_CALL.search(str(error))
    if not (users and about_the_call):
        explained = explain_forward_error(error, model, batch, field=field, output=output)
        # What a machine or another rank may have caused is a failure, and no bad input.
        elsewhere = isinstance(error, (GradusError, OSError, MemoryError)) or type(error).__module__.startswith("torch")
        if not users or explained is not error or elsewhere or type(error) is RuntimeError:
            return explained
    name = "loss" if field == "loss" else "metric"
    return raised_by_user(error, field, use, hint=f"a {name} {_CALLED.format(name)}")


def _keywords_to_add(model: nn.Module, forward: inspect.Signature) -> dict[str, Any]:
    """What a language model need not do in training: keep keys and values for the tokens to come."""
    return {"use_cache": False} if is_pretrained_model(type(model)) and "use_cache" in forward.parameters else {}


def _check_gradient_can_flow(model: nn.Module, by_loss: bool) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return  # there is nothing to train, which is said elsewhere
    raise InputError(
        "loss: no gradient reaches the model: the loss is not connected with its parameters",
        hint=(
            "compute it from the model's output without .item(), .detach(), torch.no_grad() or a trip through numpy"
            if by_loss
            else "forward must compute its loss without .item(), .detach(), torch.no_grad() or a trip through numpy"
        ),
        field="loss" if by_loss else "model",
    )


def _metric_sum_and_count(name: str, result: Any, samples: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """As for a loss, and plain numbers will do: nothing is sent back through a metric."""

    def tensor(value: Any) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return torch.full((), float(value), device=device) if number else value

    pair = isinstance(result, tuple) and len(result) == 2 and not isinstance(result, LossOutput)
    return sum_and_count(
        tuple(map(tensor, result)) if pair else tensor(result), samples, with_loss=True, what=f"metric {name}"
    )


def _device_of(batch: Batch) -> torch.device | None:
    values = batch.values() if isinstance(batch, Mapping) else batch
    return next((value.device for value in values if isinstance(value, Tensor)), None)


def _keywords(forward: inspect.Signature) -> frozenset[str] | None:
    """The names that the model's forward takes, or None when it takes any."""
    parameters = forward.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters)


def _named_loss(block: Named, model: nn.Module) -> Function:
    if is_import_path(block.use):
        return _users_function(block, "loss", model)
    return _cross_entropy if block.use == "cross-entropy" else _mean_squared_error


def _users_function(block: Named, field: str, model: nn.Module) -> Function:
    """A loss or metric of a user's own, called with the model's output and the batch; one of torch's, as torch has it.

    A class is made with the block's other keys, a function is called with them.
    """
    function = import_callable(block.use, field)
    if not isinstance(function, type):
        called = partial(function, **block.options)
    else:
        try:
            called = function(**block.options)
        except TypeError as error:
            raise InputError(f"{field}: {block.use} refused its settings: {error}", field=field) from error
        if isinstance(called, nn.Module):
            _place(called, field, block.use, model)
    if (function.__module__ or "").startswith("torch.nn."):
        return lambda output, batch: called(_logits(output), _target(batch))
    return called


def _place(loss: nn.Module, field: str, use: str, model: nn.Module) -> None:
    """Buffers of a loss, such as weights of classes, are needed where the model is."""
    trained = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]
    if trained:
        raise InputError(
            f"{field}: {use} has parameters, but only the model's are trained: {', '.join(trained)}",
            hint="make it a part of the model, which then returns the loss itself",
            field=field,
            found=trained,
        )
    like = next(model.parameters(), None)
    if like is not None:
        loss.to(like.device, torch.float64 if like.dtype == torch.float64 else None)


def _cross_entropy(
    output: Any, batch: Batch, layer: nn.Linear | None = None, chunked: ChunkedLoss | None = None
) -> tuple[Tensor, Tensor]:
    targets = _target(batch)
    if layer is not None and chunked is not None and layer.training:
        loss_sum, count, _ = chunked(layer, _logits(output), targets)
        return loss_sum, count
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
    return squares.sum(), on_device(squares.numel(), squares)


def _accuracy(output: Any, batch: Batch, next_position: bool = False) -> tuple[Tensor, Tensor]:
    targets = shifted(_target(batch)) if next_position else _target(batch)
    right = (_classes_last(_logits(output), targets).argmax(-1) == targets) & (targets != IGNORED)
    return right.sum(), (targets != IGNORED).sum()


def _classes_last(logits: Tensor, targets: Tensor) -> Tensor:
    """torch's own layout for images and sequences has the classes second."""
    return logits if logits.shape[:-1] == targets.shape else logits.movedim(1, -1)


def _logits(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else part(output, "logits")
    if not isinstance(logits, Tensor):
        raise InputError(
            f"loss: the model returned {type(output).__name__}, allowed: a tensor, or something with .logits",
            field="loss",
        )
    return logits


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
