"""Patterns: shell-like wildcards over the names of parameters and layers, as recipes use them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from gradus.schema.errors import InputError, nearest

NAMES_SHOWN = 6


def matching(names: Iterable[str], patterns: Sequence[str], field: str) -> list[str]:
    """The names that match at least one pattern, in their order. A pattern without a match is a mistake."""
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise _no_match(pattern, known, field)
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _no_match(pattern: str, known: list[str], field: str) -> InputError:
    close = nearest(pattern, known)
    shown = ", ".join(known[:NAMES_SHOWN]) + (", ..." if len(known) > NAMES_SHOWN else "")
    return InputError(
        f"{field}: {pattern!r} matches none of {len(known)} names"
        + (f"; did you mean {close!r}?" if close else ".")
        + f" They are: {shown or 'none'}",
        hint="`*` stands for any text, as in `blocks.0.*`",
        field=field,
        found=pattern,
        nearest=close,
    )
