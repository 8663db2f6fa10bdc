"""JSON that any reader accepts and that can still hold a loss that is not a number.

NaN and the infinities are no JSON. They are written as the strings "NaN", "Infinity" and "-Infinity", and these three
strings are read back as the floats. What JSON has no form for at all (a path, a dtype) is written as its text.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(record: Mapping[str, Any]) -> str:
    """The record as one line of strict JSON, without the newline."""
    return json.dumps(_writable(record), allow_nan=False)


def pretty(document: Any) -> str:
    """Any document as strict JSON over several lines."""
    return json.dumps(_writable(document), allow_nan=False, indent=1)


def decode(text: str | bytes) -> dict[str, Any]:
    """The record of one line; ValueError if it is not a whole JSON object."""
    record = _readable(json.loads(text))
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    return record


def _writable(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _writable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(item) for item in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return _writable_float(float(value))
    return str(value)


def _writable_float(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    return value
