"""Scalars: the numbers of a logged step under the names that dashboards show: `train/loss`, `validation/loss`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradus.record.metrics import VALIDATION

_NOT_SCALARS = {"step", "attempt", "evaluation", "rolled_back_to"}


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """In the order of the record."""
    return {
        _tag(key): value
        for key, value in record.items()
        if key not in _NOT_SCALARS and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _tag(key: str) -> str:
    return f"validation/{key.removeprefix(VALIDATION)}" if key.startswith(VALIDATION) else f"train/{key}"
