"""A node's share: which shards its ranks read in a run, where the order leaves some out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradus.data.order import Indices, Order, past_skipped
from gradus.data.shards.reading import Shards

if TYPE_CHECKING:
    from gradus.data.loader import Indexed, Slices

MOST_POSITIONS = 2**25  # to look at; of longer runs, all files are taken to be needed


def shards_needed(data: Indexed, order: Order, slices: Sequence[Slices], steps: range) -> dict[str, set[str]]:
    """The files that the data ranks of a node read in some steps, by the name of the source in a mixture.

    A source that is not here has no shards, or all of them are needed.
    """
    per_step = sum(one.micro_batch * one.accumulate for one in slices)
    if not steps or per_step * len(steps) > MOST_POSITIONS:
        return {}
    numbers = np.unique(np.concatenate([_numbers(one, order, steps) for one in slices]))
    sources, names, starts = (getattr(data.source, name, None) for name in ("sources", "names", "starts"))
    if sources is None or names is None or starts is None:
        return _named("", data.source, numbers)
    found: dict[str, set[str]] = {}
    for at, (name, source) in enumerate(zip(names, sources, strict=True)):
        own = numbers[(numbers >= starts[at]) & (numbers < starts[at + 1])] - starts[at]
        found |= _named(name, source, own)
    return found


def _numbers(slices: Slices, order: Order, steps: range) -> Indices:
    width = slices.micro_batch * slices.accumulate
    firsts = np.arange(steps.start, steps.stop, dtype=np.int64) * slices.batch + slices.data_rank * width
    taken = (firsts[:, None] + np.arange(width, dtype=np.int64)).ravel()
    return np.unique(order.at(past_skipped(taken[taken < slices.total_samples], slices.skipped)))


def _named(name: str, source: Any, numbers: Indices) -> dict[str, set[str]]:
    shards, part, first = (getattr(source, key, None) for key in ("shards", "part", "first"))
    if not isinstance(shards, Shards) or part is None or first is None:
        return {}
    located = np.asarray(part.locate(numbers)) + first
    needed = set(shards.index.places(located, 0).shards)
    if len(needed) == len(shards.description.shards):
        return {}
    return {name: {shards.description.shards[shard].file for shard in needed}}
