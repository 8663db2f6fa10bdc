"""Loss placement: finds a model's output layer and its loss, so that the loss can apply the layer to a few tokens at a
time.

A model may do anything between the two: cap logits, scale them, use them twice. So it is rehearsed on tensors without
values, and only where the loss is given the very tensor that a layer returned, and nothing else is, does the loss take
over that layer's work; which is rehearsed as well. Reference models offer it by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from gradus.models.output import LossOutput, classification_loss, layer_and_loss
from gradus.planner.choice.levers import chosen_chunks
from gradus.planner.defaults import Choice
from gradus.record.format import error_text
from gradus.schema.foreign import is_pretrained_model
from gradus.schema.recipe import Recipe
from gradus.training.chunked_loss import FIELD, ChunkedLoss, OutputLayer, cannot_chunk
from gradus.training.objective import Batch, Objective
from gradus.training.rehearsal import Autocast, UsesOf, autocast_now, rehearsed
from gradus.training.valid_labels import shifted


def chunk_loss(
    model: nn.Module, chunks: int, objective: Objective | None, example: Batch | None, kernel: bool | None = None
) -> None:
    """Let the model's loss, in place, work on one part of the tokens after the other. Before the model is split.

    `example` is a batch of which only the shapes matter. Own loops have no objective, and so no example. `kernel` says
    whether the loss uses its kernel, in place of where it runs.
    """
    name, head, loss = type(model).__name__, _head_of(model), ChunkedLoss(chunks, kernel)
    if head is not None:
        if type(_output_of(head)) is not nn.Linear:
            raise cannot_chunk(
                f"the output layer of {name} has an adapter beside it, which a loss in parts would leave out"
            )
        head.loss = _OfHead(loss)  # type: ignore[assignment]
    elif objective is None or example is None:
        raise cannot_chunk(f"in an own loop, the loss of {name} is computed where gradus does not see it")
    else:
        with ExitStack() as undo:
            layer = _placed(model, loss, objective, example, undo)
            layer.__class__ = OutputLayer
            undo.callback(setattr, layer, "__class__", nn.Linear)
            _check_the_loss_gets_all(model, objective, example, layer, loss)
            undo.pop_all()
    (model if head is None else head).add_module("chunked_loss", loss)  # where compilers and planners find it


def _placed(model: nn.Module, loss: ChunkedLoss, objective: Objective, example: Batch, undo: ExitStack) -> nn.Linear:
    """Put the loss where the model's is, and return the layer whose work it takes over."""
    if objective.cross_entropy:
        layer = _layer_before(model, objective, example, objective.logits_of, UsesOf())
        undo.callback(objective.use_chunks(layer, loss))
        return layer
    if is_pretrained_model(type(model)):
        return _placed_in_huggingface(model, loss, objective, example, undo)
    name = type(model).__name__
    if objective.loss is not None:
        raise cannot_chunk(
            f"the recipe's loss is {objective.loss}, and only cross-entropy is known to be the same in parts",
            hint=f"use {FIELD}=1, or `loss: cross-entropy`, if that is what {name} is trained with",
        )
    raise cannot_chunk(f"{name} computes its loss itself", hint="let it return logits, and use `loss: cross-entropy`")


def may_chunk(model: nn.Module, recipe: Recipe) -> bool:
    """Whether it is worth trying: what the model does to its logits is not looked at here."""
    cross_entropy = recipe.loss is not None and recipe.loss.use == "cross-entropy"
    return cross_entropy or is_pretrained_model(type(model)) or _head_of(model) is not None


def _head_of(model: nn.Module) -> nn.Module | None:
    """The part of a reference model that has its output layer and its loss."""
    return next((module for module in model.modules() if getattr(module, "loss", None) is layer_and_loss), None)


def _output_of(head: nn.Module) -> nn.Linear:
    return [module for module in head.modules() if isinstance(module, nn.Linear)][-1]


def with_loss_chunks(choice: Choice, recipe: Recipe, model: nn.Module, capability: tuple[int, int] | None) -> Choice:
    """The choice of an own loop, once its model is there, with what the planner knows of a recipe's before.

    For models with a head of ours: what others do to their logits is not seen here, and the loop may look at them.
    """
    head = _head_of(model)
    if head is None or "loss_chunks" in recipe.plan.fixed:
        return choice
    layer = _output_of(head)
    lengths = (getattr(getattr(module, "settings", None), "context", None) for module in model.modules())
    length = next((length for length in lengths if isinstance(length, int)), None)
    if length is None or type(layer) is not nn.Linear:  # an adapter beside it would be left out
        return choice
    chunks, why = chosen_chunks(choice.plan, capability, layer.out_features, length * choice.plan.micro_batch)
    if not why:
        return choice
    return replace(
        choice,
        plan=choice.plan.model_copy(update={"loss_chunks": chunks}),
        reasons={**choice.reasons, "loss_chunks": why},
    )


@dataclass(frozen=True)
class _OfHead:
    """In place of `layer_and_loss`, in the head of a reference model."""

    loss: ChunkedLoss

    def __call__(self, layer: nn.Linear, x: Tensor, targets: Tensor, training: bool) -> LossOutput:
        # How many are predicted right is counted from all logits; what is no plain layer multiplies by itself.
        if not training or type(layer) is not nn.Linear:
            return layer_and_loss(layer, x, targets, training)
        found: LossOutput = self.loss(layer, x, targets)
        return found


@dataclass(frozen=True)
class _OfLogits:
    """In place of `classification_loss`, in a Hugging Face model that is given batches of our own sources."""

    layer: nn.Linear
    loss: ChunkedLoss

    def __call__(self, logits: Tensor, targets: Tensor, training: bool) -> LossOutput:
        if not training:
            return classification_loss(logits, targets, training)
        found: LossOutput = self.loss(self.layer, logits, targets)
        return found


@dataclass(frozen=True)
class _OfLabels:
    """In place of the `loss_function` of a causal language model of Hugging Face, with its arguments."""

    layer: nn.Linear
    loss: ChunkedLoss
    whole: Callable[..., Any]

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int, **more: Any) -> Any:
        if not self.layer.training:
            return self.whole(logits=logits, labels=labels, vocab_size=vocab_size, **more)
        targets = more.get("shift_labels")
        if targets is None:  # each token predicts the next
            targets = shifted(labels)
        loss_sum, count, _ = self.loss(self.layer, logits, targets)
        divisor = more.get("num_items_in_batch")
        return loss_sum / (count if divisor is None else divisor)


def _placed_in_huggingface(
    model: Any, loss: ChunkedLoss, objective: Objective, example: Batch, undo: ExitStack
) -> nn.Linear:
    whole = model.loss_function
    given: dict[str, Tensor] = {}
    uses = UsesOf()

    def own(logits: Tensor, targets: Tensor, training: bool) -> LossOutput:
        given["loss_of_logits"] = logits
        with uses.are_not_meant():
            return classification_loss(logits, targets, training)

    def theirs(logits: Tensor, *positional: Any, **named: Any) -> Any:
        given["loss_function"] = logits
        with uses.are_not_meant():
            return whole(logits, *positional, **named)

    model.loss_of_logits, model.loss_function = own, theirs
    try:
        layer = _layer_before(model, objective, example, lambda _: next(iter(given.values()), None), uses)
    finally:
        del model.loss_of_logits, model._loss_function
    if "loss_of_logits" in given:
        model.loss_of_logits = _OfLogits(layer, loss)
        undo.callback(delattr, model, "loss_of_logits")
    elif getattr(whole, "__name__", "") == "ForCausalLMLoss":
        model.loss_function = _OfLabels(layer, loss, whole)
        undo.callback(delattr, model, "_loss_function")
    else:
        raise cannot_chunk(f"the loss of {type(model).__name__} is not that of a causal language model")
    return layer


def _layer_before(
    model: nn.Module,
    objective: Objective,
    example: Batch,
    logits_of: Callable[[Any], Any],
    uses: UsesOf,
) -> nn.Linear:
    """The Linear layer that returned the very logits of which the loss is computed, for nothing but the loss."""
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [module.register_forward_hook(uses.returned, prepend=True) for module in linear]
    outside: list[Autocast] = []

    def ask(batch: Batch) -> Any:
        outside.append(autocast_now())
        return objective.answer(model, batch)

    try:
        output = _rehearsed(model, ask, example, uses)
    finally:
        for hook in hooks:
            hook.remove()
    name, logits = type(model).__name__, logits_of(output)
    found = next((call for call in uses.calls if call.result is logits), None)
    if found is None:
        raise cannot_chunk(f"what {name} computes its loss of is not what a Linear layer of it returned")
    if uses.of(logits):
        raise cannot_chunk(f"{name} uses its logits for something else than the loss")
    if sum(call.layer is found.layer for call in uses.calls) > 1:
        raise cannot_chunk(f"{name} calls its output layer more than once")
    if found.autocast != outside[0]:
        raise cannot_chunk(f"{name} computes its logits in a precision of its own, by an autocast inside of it")
    return found.layer


def _check_the_loss_gets_all(
    model: nn.Module, objective: Objective, example: Batch, layer: nn.Linear, loss: ChunkedLoss
) -> None:
    """That the loss is given what the layer hands on, and nothing on the way minds that these are no logits."""
    handed: list[Tensor] = []
    given: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda *call: handed.append(call[2]), prepend=True),
        loss.register_forward_pre_hook(lambda _, arguments: given.append(arguments[1])),
    ]
    try:
        _rehearsed(model, lambda batch: objective(model, batch, 1), example)
    finally:
        for hook in hooks:
            hook.remove()
    if not given or given[-1] is not handed[-1]:
        raise cannot_chunk(f"{type(model).__name__} does something to its logits on the way to the loss")


def _rehearsed(model: nn.Module, ask: Callable[[Batch], Any], example: Batch, uses: UsesOf | None = None) -> Any:
    try:
        return rehearsed(model, ask, example, uses)
    except Exception as error:
        raise cannot_chunk(
            f"where {type(model).__name__} computes its loss cannot be seen without data: {error_text(error)}"
        ) from error
