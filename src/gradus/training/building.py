"""Building: the recipe's model and data, and errors of the user's own code told as such."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradus.checkpoint.base import mark_base
from gradus.data.loader import Indexed
from gradus.data.source import open_source
from gradus.data.split import Part, Split, scattered
from gradus.models import catalogue
from gradus.models.huggingface import require_known_weights
from gradus.planner.resolve import data_options
from gradus.schema.callables import import_callable, is_import_path
from gradus.schema.errors import InputError, unknown_name
from gradus.schema.recipe import Recipe
from gradus.schema.user_code import user_code
from gradus.training.freezing import freeze
from gradus.training.lora import with_lora
from gradus.training.pretrained import load_pretrained
from gradus.training.randomness import seed_for_construction


def build_model(recipe: Recipe, device: torch.device, dtype: torch.dtype, *, load_weights: bool = True) -> nn.Module:
    """The model on its device, ready to be trained: pretrained weights are in place, frozen is what is to be.

    It starts with the same weights on every rank. `load_weights` may be False where a checkpoint that holds all of them
    is put in their place anyway; one of adapters (lora) does not.
    """
    return finished_model(recipe, initial_model(recipe, device, dtype), load_weights=load_weights)


def finished_model(recipe: Recipe, model: nn.Module, *, load_weights: bool = True) -> nn.Module:
    """A model that was built already, with the recipe's weights, adapters and freezing."""
    if recipe.model.weights is not None and (load_weights or recipe.lora is not None):
        load_pretrained(model, Path(recipe.model.weights), recipe.model.weights_skip)
    elif load_weights:  # where a checkpoint follows, what a folder lacks does not matter
        require_known_weights(model, recipe.model.weights_skip)
    if recipe.lora is not None:
        model = with_lora(model, recipe.lora, recipe.seed)
        for name, parameter in model.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in recipe.model.weights_skip):
                parameter.requires_grad_(True)  # a new head: frozen, it would stay as it was drawn
    freeze(model, recipe.freeze)
    if recipe.lora is not None:
        mark_base(model)
    return model


def initial_model(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model as its constructor and the seed make it."""
    seed_for_construction("model", recipe.seed)
    use, options = recipe.model.use, recipe.model.options
    if not is_import_path(use):
        # Another kind of device draws other numbers. A checkpoint of adapters does not hold the base, which export and
        # load_model draw again, wherever they are: there, as for a user's own model, the host draws.
        with torch.device("cpu") if recipe.lora is not None else device:
            model = catalogue.build(use, options)
        return model.to(device=device, dtype=dtype)  # one that is read from files comes to the host, too
    model = _called("model.use", use, options)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model.use: {use} returned {type(model).__name__}, allowed: a torch.nn.Module", field="model.use"
        )
    if not model.training:  # as `from_pretrained` leaves it; parts that are frozen in a model in training mode stay so
        model.train()
    return model.to(device=device, dtype=dtype if dtype == torch.float64 else None)


def open_data(recipe: Recipe, split: Split) -> Indexed | None:
    """The training or the validation samples; None where there is nothing held out."""
    use = recipe.data.use
    if not is_import_path(use):
        if split == "validation" and recipe.data.options.get("validation") == 0:
            return None
        return Indexed(open_source(use, data_options(recipe), split, recipe.seed))
    dataset, part = _user_data(recipe, split)
    if part is not None:
        dataset = _Subset(dataset, part)
    if dataset is None or (split == "validation" and hasattr(dataset, "__len__") and len(dataset) == 0):
        return None
    return Indexed(dataset)


def _user_data(recipe: Recipe, split: Split) -> tuple[Any, Part | None]:
    """What the recipe's callable returns for a split.

    It may take `split` itself, or return a pair (training, validation), or one dataset, of which a part is held out.
    """
    use, options = recipe.data.use, dict(recipe.data.options)
    limit = recipe.data.limit if split == "train" else None
    seed_for_construction("data", recipe.seed)  # a callable that splits at random must split the same way each time
    with user_code("data.use", use):
        parameters = inspect.signature(import_callable(use, "data.use")).parameters
    if "split" in parameters:
        dataset = _called("data.use", use, {**options, "split": split})
    else:
        fraction = 0.1 if "validation" in parameters else options.pop("validation", 0.1)
        if not isinstance(fraction, (int, float)) or not 0 <= fraction < 1:
            raise InputError(
                f"data.validation: found {fraction!r}, allowed: a fraction from 0 to less than 1",
                field="data.validation",
                found=fraction,
            )
        dataset = _called("data.use", use, options)
        if _is_pair_of_datasets(dataset):
            dataset = dataset[0 if split == "train" else 1]
        else:
            length = Indexed(dataset).length
            return dataset, scattered(length, fraction, split).first(limit)
    if dataset is None or limit is None:
        return dataset, None
    return dataset, Part(Indexed(dataset).length, np.asarray).first(limit)


def _is_pair_of_datasets(returned: Any) -> bool:
    """A tuple, or the list that `torch.utils.data.random_split` returns; not a list of two samples."""
    pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    return pair and not any(isinstance(part, (Mapping, tuple, torch.Tensor)) for part in returned)


class _Subset:
    """Some samples of a map-style dataset."""

    def __init__(self, dataset: Any, part: Part) -> None:
        self._dataset = dataset
        self.part = part
        self.collate = getattr(dataset, "collate", None)

    def __len__(self) -> int:
        return self.part.length

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self.part.locate(np.array([index], dtype=np.int64))[0])]


def _called(field: str, use: str, options: dict[str, Any]) -> Any:
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
                raise unknown_name(f"key for {use}:", key, [p.name for p in named], field=f"{block}.{key}")
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in options:
            key = f"{block}.{parameter.name}"
            raise InputError(f"{key}: missing, and {use} needs it", field=key)
