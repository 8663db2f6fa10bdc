"""Syncs: the calls with which the host waits for the device, and where in the user's code they are made."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradus.diagnosis.timeline.columns import Column, Columns
from gradus.diagnosis.timeline.source_lines import Sources, frame_of
from gradus.diagnosis.timeline.trace_analysis import SyncPoint

# Calls of CUDA that return when the device has come so far. cudaMemcpy without Async waits, too.
RUNTIME_SYNCS = re.compile(
    r"^(?:cuda|cu|hip)(?:Stream|Device|Ctx|Event)Synchronize|^(?:cuda|hip)Memcpy(?:2D|3D)?$|^cuMemcpy(?:DtoH|HtoD)(?:_v2)?$"
)
# Operators that read a value of the device. Of nested ones the outermost counts.
_OPERATORS = re.compile(r"^aten::(?:item|_local_scalar_dense|is_nonzero|nonzero|equal|_assert_async_msg)$")
# On a CPU nothing waits; these would, on a GPU.
_READS = re.compile(r"^aten::(?:item|is_nonzero)$")
_METHOD = re.compile(r"<built-in method (\w+) of ")


class Place(NamedTuple):
    """A line of the user's code. `by_library`: it calls a library that does it."""

    file: str | None = None
    line: int | None = None
    by_library: bool | None = None


@dataclass(frozen=True)
class _Call:
    name: str
    start: float
    end: float
    lane: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


def sync_points(columns: Columns, *, on_gpu: bool, steps: int, marks: Column, sources: Sources) -> list[SyncPoint]:
    """By call and place, those that took longest first."""
    calls = _gpu_calls(columns) if on_gpu else _reads(columns)
    found: dict[tuple[str, Place, str | None], list[float]] = defaultdict(list)
    frames = _Frames(columns, sources)
    phases = _Phases(columns, marks)
    frames.count([(call.name, call.start, call.lane) for call in calls])
    for call in calls:
        place = frames.place(call.name, call.start, call.lane)
        found[call.name, place, phases.at(call.start, call.lane)].append(call.seconds)
    points = [
        SyncPoint(
            name,
            len(seconds),
            sum(seconds),
            place.file,
            place.line,
            len(seconds) / max(1, steps),
            phase,
            place.by_library,
        )
        for (name, place, phase), seconds in found.items()
    ]
    return sorted(points, key=lambda point: (-point.seconds, -point.count))


def waiting_intervals(columns: Columns) -> Column:
    """The calls of CUDA in which the host waits for the device."""
    return columns.runtime.where(_named(columns, columns.runtime, RUNTIME_SYNCS))


def _gpu_calls(columns: Columns) -> list[_Call]:
    """Each wait, by the operator that it happens in, if it is known for that."""
    waits = waiting_intervals(columns)
    operators = columns.host.where(_named(columns, columns.host, _OPERATORS))
    inside = _Nesting(operators)
    calls = []
    for index in range(len(waits)):
        start, end, lane = float(waits.start[index]), float(waits.end[index]), int(waits.lane[index])
        around = inside.outermost(start, lane)
        name = columns.names.all[operators.name[around] if around is not None else waits.name[index]]
        calls.append(_Call(name, start, end, lane))
    return calls


def _reads(columns: Columns) -> list[_Call]:
    operators = columns.host.where(_named(columns, columns.host, _READS))
    inside = _Nesting(operators)
    calls = []
    for index in range(len(operators)):
        start, lane = float(operators.start[index]), int(operators.lane[index])
        if inside.outermost(start, lane) == index:
            name = columns.names.all[operators.name[index]]
            calls.append(_Call(name, start, float(operators.end[index]), lane))
    return calls


def _named(columns: Columns, column: Column, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    matching = columns.names.matching(pattern)
    chosen: NDArray[np.bool_] = matching[column.name] if len(column) else np.zeros(0, dtype=bool)
    return chosen


class _Nesting:
    """Finds which events of a column a moment is in; events of a thread are nested or apart, never crossing."""

    def __init__(self, column: Column) -> None:
        self._by_lane: dict[int, tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]] = {}
        for lane in np.unique(column.lane):
            mine = np.flatnonzero(column.lane == lane)
            self._by_lane[int(lane)] = mine, column.start[mine], column.end[mine]

    def around(self, moment: float, lane: int, most: int = 4096) -> list[int]:
        """Innermost first."""
        if lane not in self._by_lane:
            return []
        mine, starts, ends = self._by_lane[lane]
        last = int(np.searchsorted(starts, moment, side="right"))
        first = max(0, last - most)
        inside = np.flatnonzero(ends[first:last] >= moment) + first
        return [int(mine[index]) for index in inside[::-1]]

    def outermost(self, moment: float, lane: int) -> int | None:
        found = self.around(moment, lane, most=64)
        return found[-1] if found else None


class _Frames:
    """Where in the user's files calls are made, as far as stacks were recorded."""

    def __init__(self, columns: Columns, sources: Sources) -> None:
        names, python = columns.names, columns.python
        self._sources, self._python = sources, python
        self._known = {int(number): frame_of(names.all[number]) for number in np.unique(python.name)}
        users = {number: frame is not None and sources.is_users(frame.file) for number, frame in self._known.items()}
        self._is_users = users
        is_method = python.kind == 1
        self._methods = python.where(is_method)
        self._method_names = [_METHOD.match(names.all[number]) for number in self._methods.name]
        self._frames = python.where(~is_method)
        self._in_frame, self._in_method = _Nesting(self._frames), _Nesting(self._methods)
        self._turn: dict[tuple[int, str, str | None], list[float]] = defaultdict(list)

    def count(self, calls: list[tuple[str, float, int]]) -> None:
        """All calls, so that those of one function can be told apart by their order."""
        for name, moment, lane in sorted(calls, key=lambda call: call[1]):
            frame, by_library = self._frame(moment, lane)
            if frame is not None and not by_library:
                self._turn[frame, name, self._method(moment, lane)].append(moment)

    def place(self, name: str, moment: float, lane: int) -> Place:
        number, by_library = self._frame(moment, lane)
        if number is None:
            return Place(by_library=by_library)
        frame = self._known[int(self._frames.name[number])]
        assert frame is not None
        line = frame.line
        if not by_library:
            method = self._method(moment, lane)
            turns = self._turn[number, name, method]
            line = self._sources.line(frame, name, method, turns.index(moment), len(turns))
        found = self._sources.found(frame.file)
        return Place(str(found) if found is not None else frame.file, line, by_library)

    def _frame(self, moment: float, lane: int) -> tuple[int | None, bool | None]:
        """The innermost frame of the user's own, and whether there are others inside it."""
        around = self._in_frame.around(moment, lane)
        mine = next(
            (depth for depth, index in enumerate(around) if self._is_users[int(self._frames.name[index])]), None
        )
        if mine is None:
            return None, True if around else None
        return around[mine], mine > 0

    def _method(self, moment: float, lane: int) -> str | None:
        around = self._in_method.around(moment, lane, most=64)
        match = self._method_names[around[0]] if around else None
        return match[1] if match else None


class _Phases:
    """In which marked phase of a step a moment is."""

    def __init__(self, columns: Columns, marks: Column) -> None:
        self._names, self._marks, self._nesting = columns.names.all, marks, _Nesting(marks)

    def at(self, moment: float, lane: int) -> str | None:
        for index in self._nesting.around(moment, lane, most=256):
            phase = phase_of(self._names[self._marks.name[index]])
            if phase is not None:
                return phase
        return None


def phase_of(mark: str) -> str | None:
    """The phase that a mark stands for: ours, or what torch marks by itself."""
    if mark.startswith("gradus:"):
        return mark.removeprefix("gradus:") if mark != "gradus:step" else None
    if mark.startswith("Optimizer."):
        return "optimizer"
    if mark.startswith("enumerate(DataLoader)"):
        return "data"
    return None
