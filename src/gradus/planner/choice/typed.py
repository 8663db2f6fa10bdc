"""Typed: keys and values as they are typed in a shell."""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def options(keys: Mapping[str, object]) -> str:
    return " ".join(f"--set {shlex.quote(f'{key}={_typed(value)}')}" for key, value in keys.items())


def _typed(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
