"""Building: the recipe's model and data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from gradus.data.loader import Indexed
from gradus.data.source import open_source
from gradus.data.split import Part, Split, scattered
from gradus.parallel.world import alone
from gradus.planner.resolve import data_options
from gradus.schema.callables import import_callable, is_import_path
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.schema.user_code import user_code
from gradus.training.construction import called, constructed, is_reference
from gradus.training.described import as_constructed, described_as, described_model
from gradus.training.randomness import seed_for_construction


def build_model(recipe: Recipe, device: torch.device, dtype: torch.dtype, *, load_weights: bool = True) -> nn.Module:
    """The whole model on its device, ready to be trained: pretrained weights are in place, frozen is what is to be.

    `load_weights` may be False where a checkpoint that holds all of them is put in their place anyway; one of adapters
    (lora) does not.
    """
    described = described_model(recipe, alone(device), dtype, load_weights=load_weights)
    described.fill(described.model, alone(device))
    return described.model


def finished_model(recipe: Recipe, model: nn.Module, *, load_weights: bool = True) -> nn.Module:
    """A model that was built already, with the recipe's weights, adapters and freezing."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    described = described_as(recipe, model, alone(device), load_weights=load_weights)
    described.fill(described.model, alone(device))
    return described.model


def initial_model(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The whole model as its constructor and the seed make it."""
    if is_reference(recipe):
        return build_model(as_constructed(recipe), device, dtype)
    return constructed(recipe, dtype).to(device)


def open_data(recipe: Recipe, split: Split) -> Indexed | None:
    """The training or the validation samples; None where there is nothing held out."""
    use = recipe.data.use
    if not is_import_path(use):
        if split == "validation" and recipe.data.options.get("validation") == 0:
            return None
        source = open_source(use, data_options(recipe), split, recipe.seed)
        source.pads_to_longest = recipe.data.group_by_length is not None
        return Indexed(source)
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
        dataset = called("data.use", use, {**options, "split": split})
    else:
        fraction = 0.1 if "validation" in parameters else options.pop("validation", 0.1)
        if not isinstance(fraction, (int, float)) or not 0 <= fraction < 1:
            raise InputError(
                f"data.validation: found {fraction!r}, allowed: a fraction from 0 to less than 1",
                field="data.validation",
                found=fraction,
            )
        dataset = called("data.use", use, options)
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


def _lengths(given: Any, samples: int) -> np.ndarray[Any, Any]:
    """Of all samples of a user's dataset, or else those of a part of it cannot be told."""
    lengths = np.asarray(given)
    if lengths.ndim != 1 or len(lengths) != samples:
        entries = f"{len(lengths)} entries" if lengths.ndim == 1 else f"the shape {list(lengths.shape)}"
        raise InputError(
            f"data.use: `lengths` has {entries}, the dataset has {samples} samples",
            hint="give it a whole number for each sample",
            field="data.use",
            found=list(lengths.shape),
            allowed=[samples],
        )
    return lengths


class _Subset:
    """Some samples of a map-style dataset."""

    def __init__(self, dataset: Any, part: Part) -> None:
        self._dataset = dataset
        self.part = part
        self.collate = getattr(dataset, "collate", None)
        self.fingerprint = getattr(dataset, "fingerprint", None)  # which samples of it, the recipe says
        self.what = type(dataset).__name__  # messages speak of the user's class
        lengths = getattr(dataset, "lengths", None)
        self.lengths = None if lengths is None else _lengths(lengths, len(dataset))[part.locate(np.arange(part.length))]

    def __len__(self) -> int:
        return self.part.length

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self.part.locate(np.array([index], dtype=np.int64))[0])]
