"""Columns: the events of a trace that an analysis needs, as compact arrays of numbers."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# As Kineto names the categories of events, earlier versions included.
_DEVICE = {
    "kernel": 0,
    "Kernel": 0,
    "gpu_memcpy": 1,
    "Memcpy": 1,
    "gpu_memset": 2,
    "Memset": 2,
}
KERNEL, COPY, FILL = 0, 1, 2
_RUNTIME = ("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime")
_HOST = ("cpu_op", "Operator")
_MARK = ("user_annotation",)
_PYTHON = ("python_function",)
# Python frames that say where a synchronisation was asked for: code, and these methods of tensors.
_SYNC_METHODS = ("item", "tolist", "cpu", "numpy", "nonzero", "to", "any", "all", "synchronize", "wait")
_BUILT_IN = re.compile(r"<built-in method (\w+) of ")
_ADDRESS = " at 0x"


class Names:
    """Names as numbers."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.all: list[str] = []

    def number(self, name: str) -> int:
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = len(self.all)
            self.all.append(name)
        return found

    def matching(self, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        """For each name, whether the pattern is found in it."""
        return np.array([pattern.search(name) is not None for name in self.all], dtype=bool)


class _Growing:
    def __init__(self) -> None:
        self.start, self.seconds = array("d"), array("d")
        self.name, self.lane, self.link, self.kind = array("i"), array("q"), array("q"), array("b")

    def add(self, event: dict[str, Any], name: int, lane: int, link: int = -1, kind: int = 0) -> None:
        self.start.append(event["ts"])
        self.seconds.append(event.get("dur", 0.0))
        self.name.append(name)
        self.lane.append(lane)
        self.link.append(link)
        self.kind.append(kind)

    def done(self, base: float) -> Column:
        start = (np.frombuffer(self.start, dtype=np.float64) - base) * 1e-6 if self.start else np.zeros(0)
        seconds = np.frombuffer(self.seconds, dtype=np.float64) * 1e-6 if self.seconds else np.zeros(0)
        order = np.argsort(start, kind="stable")
        return Column(
            start[order],
            (start + seconds)[order],
            _numbers(self.name, np.int32)[order],
            _numbers(self.lane, np.int64)[order],
            _numbers(self.link, np.int64)[order],
            _numbers(self.kind, np.int8)[order],
        )


@dataclass(frozen=True)
class Column:
    """Events of one sort by their start, in seconds."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    name: NDArray[np.int32]
    lane: NDArray[np.int64]  # the thread, or the stream of a device
    link: NDArray[np.int64]  # CUDA's number that a launch and its kernel have in common; -1: none
    kind: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def seconds(self) -> NDArray[np.float64]:
        return self.end - self.start

    def where(self, chosen: NDArray[Any]) -> Column:
        return Column(*(getattr(self, name)[chosen] for name in ("start", "end", "name", "lane", "link", "kind")))


@dataclass
class Columns:
    """All of a trace that is looked at."""

    names: Names
    device: Column  # kernels, copies and fills on a GPU
    runtime: Column  # calls of CUDA's API
    host: Column  # operators
    marks: Column  # ranges that record_function made
    python: Column  # frames, where stacks were recorded, and methods that make the host wait
    about_collectives: dict[int, tuple[int | None, str | None]] = field(default_factory=dict)  # by link: bytes, group
    events: int = 0


def read_columns(events: Iterable[dict[str, Any]]) -> Columns:
    """Take in all events; what cannot be one is passed over."""
    names = Names()
    number = names.number
    device, runtime, host, marks, python = (_Growing() for _ in range(5))
    collectives: dict[int, tuple[int | None, str | None]] = {}
    count, base = 0, None
    lanes: dict[Any, int] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        category = event.get("cat")
        name, at = event.get("name"), event.get("ts")
        if not isinstance(name, str) or not isinstance(at, int | float):
            continue
        count += 1
        if base is None:
            base = at
        lane = event.get("tid", 0)
        if type(lane) is not int:
            lane = lanes.setdefault(lane, -1 - len(lanes))
        if category in _HOST:
            host.add(event, number(name), lane, _link_of_collective(name, event, collectives))
        elif category in _DEVICE:
            arguments = event.get("args") or {}
            link = _whole(arguments.get("correlation"))
            stream = _whole(arguments.get("stream"))
            device.add(event, number(name), stream if stream >= 0 else lane, link, _DEVICE[category])
            if "Collective name" in arguments:
                collectives[link] = _collective(arguments)
        elif category in _RUNTIME:
            runtime.add(event, number(name), lane, _whole((event.get("args") or {}).get("correlation")))
        elif category in _PYTHON:
            built_in = _BUILT_IN.match(name)
            if built_in is None and not name.startswith("<"):
                python.add(event, number(name), lane)
            elif built_in is not None and built_in[1] in _SYNC_METHODS:
                python.add(event, number(name.partition(_ADDRESS)[0]), lane, kind=1)
        elif category in _MARK:
            marks.add(event, number(name), lane)
    start = base or 0.0
    return Columns(
        names,
        device.done(start),
        runtime.done(start),
        host.done(start),
        marks.done(start),
        python.done(start),
        collectives,
        count,
    )


def _link_of_collective(name: str, event: dict[str, Any], known: dict[int, tuple[int | None, str | None]]) -> int:
    """A number for an operator that says which ranks it is with, under which that is kept."""
    if name != "record_param_comms":
        return -1
    link = -2 - len(known)
    known[link] = _collective(event.get("args") or {})
    return link


def _collective(arguments: dict[str, Any]) -> tuple[int | None, str | None]:
    elements = max(_whole(arguments.get("In msg nelems")), _whole(arguments.get("Out msg nelems")))
    width = _WIDTHS.get(str(arguments.get("dtype")))
    group = arguments.get("Process Group Name")
    size = elements * width if elements >= 0 and width is not None else None
    return size, str(group) if group is not None else None


_WIDTHS = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2, "Byte": 1, "Char": 1}


def _whole(found: Any) -> int:
    return found if isinstance(found, int) else -1


def _numbers(values: array[int], kind: type[np.integer[Any]]) -> NDArray[Any]:
    widths = {"i": np.int32, "q": np.int64, "b": np.int8}
    return np.frombuffer(values, dtype=widths[values.typecode]).astype(kind) if values else np.zeros(0, dtype=kind)
