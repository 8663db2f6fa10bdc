"""Construction: the recipe's model as its constructor makes it, and errors of the user's own code told as such."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradus.models import catalogue
from gradus.schema.callables import import_callable, is_import_path
from gradus.schema.errors import InputError, unknown_name
from gradus.schema.recipe import DataBlock, Recipe
from gradus.schema.user_code import user_code
from gradus.training.compiled_in_place import compiled_in_place
from gradus.training.randomness import seed_for_construction

_KEYS_OF_ANY_DATA = [*(name for name in DataBlock.model_fields if name != "use"), "validation"]


def is_reference(recipe: Recipe) -> bool:
    """Whether the model is one of our own, which can be built without memory and be given its weights later."""
    return recipe.model.built_in and recipe.model.use != catalogue.HUGGINGFACE.name


def constructed(recipe: Recipe, dtype: torch.dtype) -> nn.Module:
    """The model as its constructor and the seed make it, on the ambient device: by default the host's memory."""
    seed_for_construction("model", recipe.seed)
    use, options = recipe.model.use, recipe.model.options
    if not is_import_path(use):
        return catalogue.build(use, options).to(dtype=dtype)
    model = called("model.use", use, options)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model.use: {use} returned {type(model).__name__}, allowed: a torch.nn.Module", field="model.use"
        )
    model = compiled_in_place(model)
    if not model.training:  # as `from_pretrained` leaves it; parts that are frozen in a model in training mode stay so
        model.train()
    return model.to(dtype=dtype) if dtype == torch.float64 else model


def called(field: str, use: str, options: dict[str, Any]) -> Any:
    with user_code(field, use):
        function: Callable[..., Any] = import_callable(use, field)
        _check_arguments(function, field, use, options)
        return function(**options)


def _check_arguments(function: Callable[..., Any], field: str, use: str, options: dict[str, Any]) -> None:
    """A key that the callable does not take, or lacks, is a mistake in the recipe and not in the callable."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables written in C do not tell
        return
    block = field.partition(".")[0]
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in options:
            if key not in [p.name for p in named]:
                known = [p.name for p in named] + (_KEYS_OF_ANY_DATA if block == "data" else [])
                raise unknown_name(f"key for {use}:", key, known, field=f"{block}.{key}")
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in options:
            key = f"{block}.{parameter.name}"
            raise InputError(f"{key}: missing, and {use} needs it", field=key)
