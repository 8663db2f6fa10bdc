"""Building: the recipe's model and data, and errors of the user's own code told as such."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gradus
from gradus.data.loader import Indexed
from gradus.data.source import open_source
from gradus.data.split import Part, Split, scattered
from gradus.models import catalogue
from gradus.planner.resolve import data_options
from gradus.schema.callables import import_callable, is_import_path
from gradus.schema.errors import GradusError, InputError
from gradus.schema.recipe import Recipe
from gradus.training.randomness import seed_for_construction

# Code that is not the user's: an error deep in torch is shown at the line of theirs that led there.
_LIBRARIES = ("<frozen", str(Path(gradus.__file__).parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))


def build_model(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on its device, with the same initial weights on every rank."""
    seed_for_construction("model", recipe.seed)
    use, options = recipe.model.use, recipe.model.options
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if not is_import_path(use):
            with torch.device(device):
                return catalogue.build(use, options)
        model = _called("model.use", use, options)
    finally:
        torch.set_default_dtype(before)
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
        return function(**options)


@contextmanager
def user_code(field: str, use: str) -> Iterator[None]:
    """An exception in the user's own function is bad input: it names the function and shows where it went wrong."""
    try:
        yield
    except GradusError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or list(frames)
        raise InputError(
            f"{field}: {use} raised {type(error).__name__}: {error}",
            hint=f"the error is in {last[-1].filename}, line {last[-1].lineno}: {last[-1].line}",
            field=field,
            found=use,
            traceback="".join(traceback.format_exception(error)),
        ) from error
