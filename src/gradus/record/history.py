"""History: all that a run wrote over time, followed as it grows, in memory that does not grow with it.

Files are read in pieces and thinned while they are read: a run with a million logged lines costs some megabytes. What
comes back is what the run kept: an attempt that goes on from a checkpoint takes back what was done after it.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradus.record.device_log import FOLDER as DEVICES
from gradus.record.device_log import Energy, energy_of
from gradus.record.directory import RunDirectory
from gradus.record.event_tails import EventTails
from gradus.record.goodput import Goodput, GoodputMeter
from gradus.record.thinning import MeanWindows, ThinnedSeries
from gradus.record.timings import FOLDER as TIMINGS
from gradus.schema.device_sample import DeviceSample

_PIECE_BYTES = 1 << 22
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NO_NUMBERS = frozenset({"step", "attempt", "evaluation", "rolled_back_to"})
_MOST_METRICS = 200  # names; a user's hook may write any number
_RATES = ("tokens_per_second", "samples_per_second", "step_seconds", "mfu")
_MOST_RATES = 65_536
_WARM_UP_ROWS = 3
_MOST_LINES = 16  # GPUs or nodes that are followed one by one; more are only followed together
_MOST_RANKS = 64  # whose time by kind is followed one by one
ALL = "all"


class LogStream:
    """The records of a file of JSON lines, and at the next call those that were added. Broken lines are left out."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.broken = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            file = self._path.open("rb")
        except OSError:  # not there yet, or a stale handle of a network file system: the next time reads on
            return
        with file:
            end = os.fstat(file.fileno()).st_size
            while self._offset < end:
                file.seek(self._offset)
                data = file.read(min(_PIECE_BYTES, end - self._offset))
                whole = data.rfind(b"\n") + 1
                if not whole:
                    if len(data) < _PIECE_BYTES:
                        return  # an unfinished last line
                    whole = len(data)  # no line of ours is as long as this: what it is, is broken
                self._offset += whole
                for line in data[:whole].splitlines():
                    try:
                        record = json.loads(line)
                    except ValueError:
                        self.broken += bool(line.strip())
                        continue
                    if isinstance(record, dict):
                        yield record
                    else:
                        self.broken += 1


@dataclass
class Rates:
    """The numbers of one metric for a median that keeping extremes would spoil: all, or of very many each nth."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    _every: int = 1
    _seen: int = 0

    def add(self, step: int, value: float) -> None:
        self._seen += 1
        if self._seen % self._every or not math.isfinite(value):
            return
        self.steps.append(step)
        self.values.append(value)
        if len(self.values) > _MOST_RATES:
            del self.steps[::2], self.values[::2]
            self._every *= 2

    def cut(self, step: int) -> None:
        at = bisect_left(self.steps, step)
        del self.steps[at:], self.values[at:]

    @property
    def usual(self) -> array[float]:
        """Without the first: compilation, caches and the allocator's growth are not what the speed is."""
        return self.values[_WARM_UP_ROWS:] or self.values

    @property
    def median(self) -> float | None:
        return statistics.median(self.usual) if self.values else None

    @property
    def standard_error(self) -> float | None:
        """Of the mean, by the scatter of what was logged."""
        return statistics.stdev(self.usual) / math.sqrt(len(self.usual)) if len(self.usual) > 2 else None


@dataclass(frozen=True)
class _Timing:
    """A line of a rank's timings."""

    attempt: int
    rank: int
    step: int
    steps: int
    seconds: dict[str, float]
    own_seconds: float | None


@dataclass
class History:
    """Follows a run. Each `poll` takes in what is new; what was read is not read again."""

    run: RunDirectory
    metrics: dict[str, ThinnedSeries] = field(default_factory=dict)
    """By name, over steps."""
    rates: dict[str, Rates] = field(default_factory=lambda: {name: Rates() for name in _RATES})
    attempts_of_steps: list[tuple[int, int]] = field(default_factory=list)
    """(attempt, the first step that it logged)."""
    kinds: dict[int, MeanWindows] = field(default_factory=dict)
    """By attempt: mean seconds of a step by kind, over all ranks."""
    own: dict[int, MeanWindows] = field(default_factory=dict)
    """By attempt: a rank's own seconds in a step, by its number."""
    of_rank: dict[int, dict[int, MeanWindows]] = field(default_factory=dict)
    """By attempt and rank: mean seconds of a step by kind."""
    rank_nodes: dict[int, str] = field(default_factory=dict)
    memory: dict[int, dict[str, ThinnedSeries]] = field(default_factory=dict)
    """By rank: `peak` and `reserved` bytes over steps."""
    times: ThinnedSeries = field(default_factory=lambda: ThinnedSeries(4000))
    """The unix time over steps, of the lowest rank that was timed."""
    devices: MeanWindows = field(default_factory=lambda: MeanWindows(300))
    """Over whole seconds since `begun`, by `<gpu or node>/<what>`; `all/<what>` over all of them."""
    lowest: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    gpu_names: dict[str, str] = field(default_factory=dict)
    """By `<node> GPU <index>`: what it calls itself."""
    nodes: list[str] = field(default_factory=list)
    throttled: dict[str, int] = field(default_factory=dict)
    """By reason: in how many samples of a GPU its clock was held down for it."""
    gpu_samples: int = 0
    device_samples: int = 0
    has_driver: bool = False
    begun: float | None = None
    """Unix time of the first sample of any device."""
    events: list[dict[str, Any]] = field(default_factory=list)
    logged_lines: int = 0

    def __post_init__(self) -> None:
        self._metrics_stream = LogStream(self.run.metrics_path)
        self._streams: dict[Path, LogStream] = {}
        self._tails = EventTails(self.run)
        self._goodput = GoodputMeter()
        self._attempt = -1
        self._timed_rank: int | None = None
        self._last_timings: dict[int, _Timing] = {}
        # Of each node and attempt the first and last sample, and those around a counter that was set back.
        self._turns: list[DeviceSample] = []
        self._last_samples: dict[tuple[str, int], DeviceSample] = {}

    @property
    def broken_lines(self) -> int:
        return self._metrics_stream.broken + sum(stream.broken for stream in self._streams.values())

    def poll(self) -> bool:
        """Take in what was written since. Returns whether there was anything."""
        before = (self.logged_lines, len(self.events), self.device_samples, self._timing_lines)
        new = self._tails.poll()
        self.events += new
        self._goodput.add_events(new)
        for record in self._metrics_stream:
            self.logged_lines += 1
            self._goodput.add_metrics((record,))
            self._take_metrics(record)
        for record in self._records(TIMINGS):
            self._take_timing(record)
        for record in self._records(DEVICES):
            self._take_devices(record)
        return before != (self.logged_lines, len(self.events), self.device_samples, self._timing_lines)

    _timing_lines: int = 0

    def goodput(self, **of: Any) -> Goodput:
        return self._goodput.goodput(**of)

    def energy(self) -> Energy:
        return energy_of([*self._turns, *self._last_samples.values()])

    def last(self, name: str) -> float | None:
        series = self.metrics.get(name)
        return series.last[1] if series is not None and series.last is not None else None

    @property
    def last_step(self) -> int:
        return int(max((series.last[0] for series in self.metrics.values() if series.last), default=0))

    def step_at(self, time: float) -> float | None:
        """The step that was being made at a moment, as far as timings tell."""
        points = self.times.points
        if not points:
            return None
        at = bisect_left([when for _, when in points], time)
        return points[min(at, len(points) - 1)][0]

    def kept_kinds(self) -> tuple[list[float], dict[str, list[float]]]:
        """Over the steps that the run kept: where windows begin, and for each kind its mean seconds in them."""
        xs: list[float] = []
        found: dict[str, list[float]] = {}
        windows = sorted(self.kinds.items())
        for at, (_, one) in enumerate(windows):
            later = min((start for _, other in windows[at + 1 :] for start in other.starts), default=math.inf)
            for place, start in enumerate(one.starts):
                if start >= later:
                    break
                xs.append(start)
                for kind in one.names:
                    found.setdefault(kind, [0.0] * (len(xs) - 1))
                for kind, column in found.items():
                    column.append(one.means(kind)[place] or 0.0)
        return xs, found

    def _records(self, folder: str) -> Iterator[dict[str, Any]]:
        for path in sorted((self.run.path / folder).glob("*.jsonl")):
            yield from self._streams.setdefault(path, LogStream(path))

    def _take_metrics(self, record: Mapping[str, Any]) -> None:
        back = record.get("rolled_back_to")
        if isinstance(back, int):
            self._cut(back + 1)
        step = record.get("step")
        if not isinstance(step, int):
            return
        attempt = record.get("attempt", 0)
        if attempt != self._attempt:
            if self._attempt >= 0:
                self._cut(step)
            self._attempt = attempt
            self.attempts_of_steps.append((attempt, step))
        for name, value in record.items():
            if name in _NO_NUMBERS:
                continue
            if isinstance(value, str):
                value = _NOT_FINITE.get(value)
            if value is None or isinstance(value, (bool, list, dict)):
                continue
            series = self.metrics.get(name)
            if series is None:
                if len(self.metrics) >= _MOST_METRICS:
                    continue
                series = self.metrics[name] = ThinnedSeries()
            series.add(step, value)
            if name in self.rates:
                self.rates[name].add(step, value)

    def _cut(self, step: int) -> None:
        for series in self.metrics.values():
            series.cut(step)
        for rates in self.rates.values():
            rates.cut(step)

    def _take_timing(self, record: Mapping[str, Any]) -> None:
        try:
            attempt, rank, step = int(record["attempt"]), int(record["rank"]), int(record["step"])
            steps, when = int(record["steps"]), float(record["time"])
            seconds = {str(kind): float(value) for kind, value in record["seconds"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            return
        self._timing_lines += 1
        self.rank_nodes[rank] = str(record.get("node", ""))
        own = record.get("own_seconds")
        new = _Timing(attempt, rank, step, steps, seconds, float(own) if isinstance(own, (int, float)) else None)
        old = self._last_timings.get(rank)
        if old is not None and (old.attempt, old.step) == (attempt, step):
            self._add_timing(old, -1)  # a later line of the same step has what came after it
        self._add_timing(new)
        self._last_timings[rank] = new
        for key, name in (("memory_peak_bytes", "peak"), ("memory_reserved_bytes", "reserved")):
            value = record.get(key)
            if isinstance(value, (int, float)):
                series = self.memory.setdefault(rank, {}).setdefault(name, ThinnedSeries(160))
                _follow(series, step, float(value))
        if self._timed_rank is None or rank < self._timed_rank:
            self._timed_rank, self.times = rank, ThinnedSeries(4000)
        if rank == self._timed_rank:
            _follow(self.times, step, when)

    def _add_timing(self, one: _Timing, sign: int = 1) -> None:
        middle, weight = max(1, one.step - one.steps // 2), sign * one.steps
        self.kinds.setdefault(one.attempt, MeanWindows()).add(middle, one.seconds, weight)
        if one.rank < _MOST_RANKS:
            of_attempt = self.of_rank.setdefault(one.attempt, {})
            of_attempt.setdefault(one.rank, MeanWindows(2)).add(middle, one.seconds, weight)
        if one.own_seconds is not None:
            self.own.setdefault(one.attempt, MeanWindows()).add(middle, {str(one.rank): one.own_seconds}, weight)

    def _take_devices(self, record: Mapping[str, Any]) -> None:
        try:
            sample = DeviceSample.model_validate(record)
        except ValueError:
            return
        self.device_samples += 1
        if self.begun is None:
            self.begun = sample.time
        second = round(sample.time - self.begun)
        if sample.node not in self.nodes:
            self.nodes.append(sample.node)
        values = {"cpu": sample.host.cpu_utilisation, "host memory": sample.host.memory_used_bytes}
        self._add_device(second, sample.node, values, len(self.nodes))
        if sample.gpus is not None:
            self.has_driver = True
        for gpu in sample.gpus or ():
            label = f"{sample.node} GPU {gpu.index}"
            self.gpu_names.setdefault(label, gpu.name or "GPU")
            share = gpu.clock_mhz / gpu.clock_max_mhz if gpu.clock_mhz and gpu.clock_max_mhz else None
            values = {
                "utilisation": gpu.utilisation,
                "power": gpu.power_watts,
                "temperature": gpu.temperature_celsius,
                "clock": gpu.clock_mhz,
                "clock share": share,
                "memory": gpu.memory_used_bytes,
            }
            self._add_device(second, label, values, len(self.gpu_names))
            self.gpu_samples += 1
            for reason in gpu.throttle or ():
                self.throttled[reason] = self.throttled.get(reason, 0) + 1
        self._keep_turns(sample)

    def _add_device(self, second: int, label: str, values: Mapping[str, float | None], known: int) -> None:
        found = {name: float(value) for name, value in values.items() if value is not None}
        if known <= _MOST_LINES:
            self.devices.add(second, {f"{label}/{name}": value for name, value in found.items()})
        self.devices.add(second, {f"{ALL}/{name}": value for name, value in found.items()})
        for name, value in found.items():
            self.lowest[name] = min(value, self.lowest.get(name, math.inf))
            self.highest[name] = max(value, self.highest.get(name, -math.inf))

    def _keep_turns(self, sample: DeviceSample) -> None:
        key = (sample.node, sample.attempt)
        before = self._last_samples.get(key)
        if before is None:
            self._turns.append(sample)
        elif _fell(before, sample):
            self._turns += [before, sample]
        self._last_samples[key] = sample


def _fell(before: DeviceSample, after: DeviceSample) -> bool:
    """Whether the energy counter of any GPU was set back, or is there only now."""
    counters = {gpu.index: gpu.energy_joules for gpu in before.gpus or ()}
    for gpu in after.gpus or ():
        known = counters.get(gpu.index)
        if gpu.energy_joules is not None and (known is None or gpu.energy_joules < known):
            return True
    return False


def _follow(series: ThinnedSeries, x: float, y: float) -> None:
    """Add a point; if the axis goes back, so did the run."""
    if series.last is not None and x <= series.last[0]:
        series.cut(x)
    series.add(x, y)
