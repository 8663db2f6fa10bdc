"""Wording: numbers of findings and deviations as people read them, from keys that end in their unit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gradus.record.format import bytes_text, number_text, rate_text

_SET = re.compile(r"--set '?(?P<keys>[a-z_.]+)=(?P<value>\{[^}]*\}|\[[^\]]*\]|[^\s;,':]+)'?")


def in_an_own_loop(change: str) -> str:
    """A change for a script that makes its recipe itself: a flag would not reach it.

    >>> in_an_own_loop("--set plan.workers=4; or cheaper samples")
    'plan: {workers: 4} in the recipe of gradus.Run.start; or cheaper samples'
    """

    def in_recipe(found: re.Match[str]) -> str:
        *outer, last = found["keys"].split(".")
        text = f"{last}: {found['value']}"
        for key in reversed(outer):
            text = f"{key}: {{{text}}}"
        return f"{text} in the recipe of gradus.Run.start"

    return _SET.sub(in_recipe, change)


def words(key: str) -> str:
    return key.replace("_", " ")


def amount_text(value: float | None, unit: str) -> str:
    """A number in seconds, bytes or a rate; a dash for what nobody has."""
    if value is None:
        return "-"
    if unit == "bytes":
        return bytes_text(value)
    return rate_text(value, unit.removesuffix("/s")) if unit.endswith("/s") else f"{number_text(value)} s"


def evidence_text(key: str, value: Any) -> str:
    """`data 0.041 s`, from a key that ends in its unit."""
    if isinstance(value, Mapping):
        return f"{words(key)}: " + ", ".join(evidence_text(str(name), one) for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return f"{words(key)} " + ", ".join(_plain(one) for one in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        for ending, text in (
            ("_seconds", f"{number_text(value)} s"),
            ("_bytes", bytes_text(value)),
            ("_share", f"{value:.0%}"),
            ("_watts", f"{value:.0f} W"),
            ("_celsius", f"{value:.0f} °C"),
            ("_mhz", f"{value:.0f} MHz"),
        ):
            if key.endswith(ending):
                return f"{words(key.removesuffix(ending))} {text}"
        if key == "share":
            return f"share {value:.0%}"
    return f"{words(key)} {_plain(value)}"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(evidence_text(str(name), one) for name, one in value.items()) + ")"
    return number_text(value) if isinstance(value, float) else str(value)
