"""Slurm's lists of nodes, `gpu[01-03,07],login`, taken apart. Inside of a container there is no scontrol to ask."""

from __future__ import annotations

import itertools
import re


def expanded(text: str) -> list[str]:
    """The names in a list, in its order.

    >>> expanded("gpu[01-03,7],n1")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'n1']
    """
    items = [item for item in re.split(r",(?![^\[]*\])", text.strip()) if item]
    return [name for item in items for name in _names(item)]


def _names(item: str) -> list[str]:
    """One item may have several brackets: `rack[1-2]node[1-4]`."""
    pieces = re.split(r"\[([^\]]*)\]", item)
    choices = [[piece] if at % 2 == 0 else _numbers(piece) for at, piece in enumerate(pieces)]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _numbers(ranges: str) -> list[str]:
    found = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not dash:
            found.append(first)
            continue
        width = len(first) if first.startswith("0") else 0
        found += [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    return found
