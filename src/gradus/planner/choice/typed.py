"""Typed: keys and values as they are typed in a shell."""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def options(keys: Mapping[str, object]) -> str:
    values = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in keys.items()}
    return " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in values.items())
