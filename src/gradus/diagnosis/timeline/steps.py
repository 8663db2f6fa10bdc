"""Steps: which part of a trace is analysed. Whole steps where they are marked, else everything."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradus.diagnosis.timeline.columns import Columns

_OURS = re.compile(r"^gradus:step$")
_TORCHS = re.compile(r"^ProfilerStep#\d+$")


@dataclass(frozen=True)
class Steps:
    """From the beginning of the first step to the end of the last one, on the host's clock."""

    start: float
    end: float
    starts: NDArray[np.float64]  # of each step
    lane: int | None  # the thread that trains, where marks say so

    @property
    def count(self) -> int:
        return len(self.starts)


def steps_of(columns: Columns, most: int | None = None) -> Steps:
    """The marked steps, at most so many; a trace without marks is taken for one step."""
    marks = columns.marks
    for pattern in (_OURS, _TORCHS):
        matching = columns.names.matching(pattern)
        chosen = marks.where(matching[marks.name]) if len(marks) else marks
        if len(chosen):
            chosen = chosen.where(np.arange(len(chosen))[:most])
            return Steps(float(chosen.start[0]), float(chosen.end.max()), chosen.start, int(chosen.lane[0]))
    everything = [column for column in (columns.device, columns.runtime, columns.host, columns.marks) if len(column)]
    if not everything:
        everything = [columns.python]
    start = min((float(column.start[0]) for column in everything if len(column)), default=0.0)
    end = max((float(column.end.max()) for column in everything if len(column)), default=0.0)
    return Steps(start, end, np.array([start]), None)
