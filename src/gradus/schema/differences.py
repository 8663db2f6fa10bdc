"""Differences: the keys in which two documents differ, by the names that `--set` knows them by (`optimizer.lr`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    key: str
    before: Any  # None: not given
    now: Any


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """In the order of `before`; keys that only `now` has come last."""
    old, new = ({k: v for key in document for k, v in flat(key, document[key]).items()} for document in (before, now))
    keys = dict.fromkeys([*old, *new])
    return [Difference(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def flat(name: str, value: Any) -> dict[str, Any]:
    """Nested keys by their names in the recipe: data.sources.code.weight."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {key: item for part, inner in value.items() for key, item in flat(f"{name}.{part}", inner).items()}


def began_and_found(key: str, began: Any, found: Any) -> str:
    return f"{key}: the run began with {_said(began)}, found {_said(found)}"


def _said(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return "the default" if value is None else repr(value)
