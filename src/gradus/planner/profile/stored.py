"""Stored: a profile as text and back, so that another process can trace a model and nobody traces it twice."""

from __future__ import annotations

import functools
import json
import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gradus.planner.profile.program import Amount, ModelProfile


def to_text(profile: ModelProfile) -> str:
    return json.dumps(_plain(profile), separators=(",", ":"))


def from_text(text: str) -> ModelProfile:
    profile = _read(json.loads(text), ModelProfile)
    assert isinstance(profile, ModelProfile)
    return profile


def _plain(value: Any) -> Any:
    """Dataclasses as lists of their fields, in order: names are repeated thousands of times otherwise."""
    if is_dataclass(value) and not isinstance(value, type):
        return [_plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _read(value: Any, kind: Any) -> Any:
    if kind is Amount:
        return Amount(*value)
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return kind(*(_read(item, hint) for item, hint in zip(value, _hints(kind), strict=True)))
    origin = get_origin(kind)
    if origin is tuple:
        kinds = get_args(kind)
        each = (kinds[0],) * len(value) if kinds[-1] is Ellipsis else kinds
        return tuple(_read(item, one) for item, one in zip(value, each, strict=True))
    if origin in (Union, types.UnionType) and value is not None:
        return _read(value, next(one for one in get_args(kind) if one is not type(None)))
    assert value is None or origin is Literal or isinstance(value, (str, int, float)), f"{kind}: {value!r}"
    return value


@functools.cache
def _hints(kind: type) -> tuple[Any, ...]:
    hints = get_type_hints(kind)
    return tuple(hints[field.name] for field in fields(kind))
