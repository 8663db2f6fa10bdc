"""Sizes as people write them: `256MiB`, `1.5GB`, `4096`."""

from __future__ import annotations

import re

from gradus.schema.errors import InputError

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_UNITS |= {"tib": 2**40, "b": 1}


def byte_size(text: str, field: str) -> int:
    """How many bytes a size is."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found.group(2).lower() not in _UNITS:
        allowed = "a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB"
        message = f"{field}: found {text!r}, allowed: {allowed}"
        raise InputError(message, field=field, found=text, allowed=allowed)
    return round(float(found.group(1)) * _UNITS[found.group(2).lower()])
