"""Pickled: weights in a file that torch.save wrote, read without running anything that is in it."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradus.checkpoint.own_names import by_own_names
from gradus.record.format import first_line
from gradus.schema.errors import InputError

_NESTED = ("state_dict", "model_state_dict", "model", "module", "weights")
_WRAPPER = "module."  # what DDP puts before every name
_NAMES_SHOWN = 5


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a .pt, .pth or .bin file, by the names of the bare model."""
    return stripped(_tensors_in(_loaded(path), path))


def stripped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without what torch.compile puts into some of them, and DDP before each, in whatever order and number."""
    own = by_own_names(tensors)
    while own and all(name.startswith(_WRAPPER) for name in own):
        own = {name.removeprefix(_WRAPPER): tensor for name, tensor in own.items()}
    return own


def _loaded(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of formats that are old: it is being left behind right now
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"FILE: {path}: no such file", field="FILE", found=str(path)) from error
    except pickle.UnpicklingError as error:
        if "weights_only" not in str(error) and "Unsupported" not in str(error):
            raise _unreadable(path, error) from error
        raise InputError(
            f"FILE: {path} holds more than tensors: opening it would run code that is in it, and that was not done. "
            f"{_what_it_wanted(error)}",
            hint="where you trust the file, save only its tensors: torch.save(model.state_dict(), 'weights.pt')",
            field="FILE",
            found=str(path),
        ) from error
    except Exception as error:  # torch raises every kind of exception for files that are none of its own
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    first = first_line(error)
    return InputError(
        f"FILE: {path} cannot be read as a file that torch.save wrote: {type(error).__name__}: {first}",
        field="FILE",
        found=str(path),
        allowed="a .pt, .pth or .bin file",
    )


def _what_it_wanted(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line), "")
    return f"(torch: {line[:200]})" if line else ""


def _tensors_in(loaded: Any, path: Path) -> dict[str, Tensor]:
    """A mapping of names to tensors, from the file itself or from inside a training checkpoint."""
    seen: set[int] = set()  # a pickled mapping may contain itself
    while isinstance(loaded, Mapping) and id(loaded) not in seen:
        seen.add(id(loaded))
        if loaded and all(isinstance(value, Tensor) for value in loaded.values()):
            return {str(name): tensor for name, tensor in loaded.items()}
        inner = next((loaded[key] for key in _NESTED if isinstance(loaded.get(key), Mapping)), None)
        if inner is None:
            tensors = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
            if tensors and not any(isinstance(value, Mapping) for value in loaded.values()):
                return tensors  # a state dict with a few numbers or texts beside its tensors
            break
        loaded = inner
    found = list(loaded)[:_NAMES_SHOWN] if isinstance(loaded, Mapping) else type(loaded).__name__
    raise InputError(
        f"FILE: {path} has no mapping of names to tensors; found {found}",
        hint=f"such a mapping is looked for at the top and under {', '.join(_NESTED)}",
        field="FILE",
        found=found,
    )
