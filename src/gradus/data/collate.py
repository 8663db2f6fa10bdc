"""Collate: the samples of a user's dataset put together into one batch, and what to change when they do not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from gradus.schema.errors import InputError

KINDS_SHOWN, NUMBERS_SHOWN = 4, 3


def collated(items: Sequence[Any], numbers: Sequence[int] | None = None) -> Any:
    """torch's default, except that a list of numbers is one tensor: so tokenizers give their token ids.

    `numbers` are those of the samples in their dataset, for messages.
    """
    try:
        return default_collate([_with_tensors(item) for item in items])
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        raise _explained(error, items, numbers) from error


def _with_tensors(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {key: _tensor(value) for key, value in item.items()}
    if type(item) in (tuple, list):
        return tuple(map(_tensor, item))
    return item


def _tensor(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _with_tensors(value)
    if isinstance(value, list) and value and _holds_numbers(value):
        try:
            return torch.tensor(value)
        except ValueError:  # lists in it of unequal lengths
            return value
    return value


def _holds_numbers(values: list[Any]) -> bool:
    first = values[0]
    return _holds_numbers(first) if isinstance(first, list) and first else isinstance(first, (int, float))


def _explained(error: Exception, items: Sequence[Any], numbers: Sequence[int] | None) -> InputError:
    """Which entry differs between samples, how, and in which of them."""
    entries = [_entries(item) for item in items]
    names = {name for entry in entries for name in entry}
    hint = "give the dataset a `collate` method (or attribute) that takes the list of samples"
    for name in sorted(names):
        found = [entry.get(name, "missing") for entry in entries]
        if "NoneType" in found:
            hint = "leave the entry out, or " + hint
        elif len(set(found)) > 1:
            hint = "make all samples alike (pad them, for example), or " + hint
        else:
            continue
        shown = ", ".join(
            f"{kind}{_where(kind, found, numbers)}" for kind, _ in Counter(found).most_common(KINDS_SHOWN)
        )
        return InputError(f"data.use: samples cannot form a batch: {name} is {shown}", hint=hint, field="data.use")
    return InputError(f"data.use: samples cannot form a batch: {error}", hint=hint, field="data.use")


def _where(kind: str, found: Sequence[str], numbers: Sequence[int] | None) -> str:
    """The first samples with such an entry."""
    if numbers is None:
        return ""
    those = [number for number, other in zip(numbers, found, strict=True) if other == kind]
    more = ", …" if len(those) > NUMBERS_SHOWN else ""
    return f" in item{'s' if len(those) > 1 else ''} {', '.join(map(str, those[:NUMBERS_SHOWN]))}{more}"


def _entries(item: Any, prefix: str = "") -> dict[str, str]:
    """Every entry of a sample, with its shape or type."""
    if not isinstance(item, (Mapping, tuple, list)):
        return {"a sample": type(item).__name__}
    pairs = item.items() if isinstance(item, Mapping) else ((f"element {at}", value) for at, value in enumerate(item))
    found: dict[str, str] = {}
    for name, value in pairs:
        if isinstance(value, Mapping) or type(value) is tuple:
            found |= _entries(value, f"{prefix}{name}.")
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            found[f"{prefix}{name}"] = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        elif isinstance(value, list):
            found[f"{prefix}{name}"] = f"a list of {len(value)}"
        else:
            found[f"{prefix}{name}"] = type(value).__name__
    return found
