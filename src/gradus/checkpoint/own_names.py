"""Own names: those that a model's tensors have without what torch.compile puts into them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

COMPILED = "_orig_mod"  # under which torch.compile holds the model, or the part of one, that it wraps

Value = TypeVar("Value")


def own_name(name: str) -> str:
    """`blocks.0.weight` of `_orig_mod.blocks.0._orig_mod.weight`."""
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)


def by_own_names(named: Mapping[str, Value]) -> dict[str, Value]:
    return {own_name(name): value for name, value in named.items()}
