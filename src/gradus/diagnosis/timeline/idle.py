"""Idle: why a GPU had nothing to do, from what the host did meanwhile.

A gap between two pieces of work on the device is the host's if what ends it was launched only after it had begun. Such
a gap is cut up, in this order:

- where the host waited for data, it is a wait for data;
- the rest of one that began while the host waited for the device is a synchronisation's: the device had run empty, and
  whatever follows had not been launched, because the host had waited;
- the rest is launch-starved as far as the host was busy with torch meanwhile: it could not launch as fast as the device
  worked.

What is left is other: code of the user's own on the host, a checkpoint, dependencies between streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradus.diagnosis.timeline.columns import Column
from gradus.diagnosis.timeline.intervals import Intervals, closed, common, length, union, without

_CLOCKS = 5e-6  # how far the clocks of host and device may be apart
# Python between two operators of a step takes less than this; what takes longer is something else.
_BETWEEN_OPERATORS = 500e-6


@dataclass(frozen=True)
class Idle:
    launch_starved: float
    data: float
    sync: float
    other: float


def split_idle(
    gaps: Intervals, work: Column, launched: NDArray[np.float64], waits: Column, host: Intervals, data: Intervals
) -> Idle:
    """`work` is what ran on the device, with the moments when it was launched; `waits` are the calls in which the host
    waited for it, `host` says when the host was busy."""
    if not len(gaps):
        return Idle(0.0, 0.0, 0.0, 0.0)
    # Work that had been launched before a gap began was held up by something on the device, and not by the host.
    late = gaps[_launched_late(gaps, work, launched)]
    for_data = common(late, data)
    by_sync = without(late[_began_in_wait(late, waits)], for_data)
    rest = without(without(late, for_data), by_sync)
    starved = common(rest, closed(host, _BETWEEN_OPERATORS))
    other = length(gaps) - length(for_data) - length(by_sync) - length(starved)
    return Idle(length(starved), length(for_data), length(by_sync), max(0.0, other))


def _began_in_wait(gaps: Intervals, waits: Column) -> NDArray[np.bool_]:
    """For each gap, whether the host was waiting for the device when it began."""
    covered = union(waits.start, waits.end + _CLOCKS)
    if not len(covered):
        return np.zeros(len(gaps), dtype=bool)
    at = np.searchsorted(covered[:, 0], gaps[:, 0] + _CLOCKS, side="right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (gaps[:, 0] <= covered[np.maximum(at, 0), 1])
    return inside


def _launched_late(gaps: Intervals, work: Column, launched: NDArray[np.float64]) -> NDArray[np.bool_]:
    """For each gap, whether what ended it was launched only after it had begun. Unknown launches count as late."""
    ended_by = np.searchsorted(work.start, gaps[:, 1] - 1e-9, side="left")
    moments = np.append(launched, np.nan)[ended_by]  # after the last one comes nothing
    late: NDArray[np.bool_] = np.isnan(moments) | (moments > gaps[:, 0] - _CLOCKS)
    return late


def launch_moments(work: Column, runtime: Column) -> NDArray[np.float64]:
    """When each piece of work was launched; NaN where the trace does not have it."""
    known = runtime.where(runtime.link >= 0)
    if not len(known):
        return np.full(len(work), np.nan)
    order = np.argsort(known.link, kind="stable")
    links = known.link[order]
    at = np.minimum(np.searchsorted(links, work.link), len(links) - 1)
    return np.where(links[at] == work.link, known.start[order[at]], np.nan)
