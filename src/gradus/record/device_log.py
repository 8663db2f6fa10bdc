"""Device log: samples of each node's GPUs and host, `devices/<node>.jsonl`, and the energy that follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import ValidationError

from gradus.record.append_log import log_in_folder
from gradus.record.directory import RunDirectory
from gradus.record.few_lines import few_lines, share_of_lines
from gradus.record.problem import OnProblem, report_on_stderr
from gradus.schema.device_sample import DeviceSample

FOLDER = "devices"


class DeviceLog:
    """The file of one node."""

    def __init__(self, run: RunDirectory, node: str, on_problem: OnProblem = report_on_stderr) -> None:
        self._log = log_in_folder(run, FOLDER, node, "devices are", on_problem)

    def write(self, sample: DeviceSample) -> None:
        self._log.write(sample.model_dump(exclude_none=True))

    def close(self) -> list[str]:
        return self._log.close()


def read_device_samples(run: RunDirectory, attempt: int | None = None) -> list[DeviceSample]:
    """Those of all nodes by time, or of all in one attempt. Lines that cannot be read are left out."""
    found: list[DeviceSample] = []
    paths = list((run.path / FOLDER).glob("*.jsonl"))
    for path in paths:
        for record in few_lines(path, share_of_lines(len(paths))):
            try:
                found.append(DeviceSample.model_validate(record))
            except ValidationError:
                continue
    return sorted((one for one in found if attempt is None or one.attempt == attempt), key=lambda one: one.time)


@dataclass(frozen=True)
class Energy:
    """What the GPUs of a run took, by the counters of their driver. None where a GPU has no counter."""

    joules: float | None  # of all of them; None if any has no counter, since a part is no answer
    seconds: float  # in which they took it, attempts added up
    by_gpu: dict[str, float | None]  # by UUID, or `node:index` where the driver gives none

    @property
    def average_watts(self) -> float | None:
        """Of all GPUs together."""
        return self.joules / self.seconds if self.joules is not None and self.seconds > 0 else None

    def per(self, count: float | None) -> float | None:
        """Joules for each of so many samples or tokens."""
        return self.joules / count if self.joules is not None and count else None


def energy_of(samples: Sequence[DeviceSample]) -> Energy:
    """Differences of the drivers' counters, within each attempt: what a GPU did between attempts is not the run's."""
    spans: dict[int, tuple[float, float]] = {}
    for one in samples:
        first, last = spans.get(one.attempt, (one.time, one.time))
        spans[one.attempt] = (min(first, one.time), max(last, one.time))
    return energy_between(samples, spans)


def energy_between(samples: Sequence[DeviceSample], spans: Mapping[int, tuple[float, float]]) -> Energy:
    """The same of a part of each attempt, from one unix time to another; between two samples power counts as even."""
    joules: dict[str, float | None] = {}
    for attempt, readings in _by_gpu(samples).items():
        if attempt not in spans:
            continue
        for gpu, counters in readings.items():
            used, before = _used(counters, *spans[attempt]), joules.get(gpu, 0.0)
            joules[gpu] = before + used if before is not None and used is not None else None
    known = [used for used in joules.values() if used is not None]
    whole = sum(known) if known and len(known) == len(joules) else None
    return Energy(whole, sum(last - first for first, last in spans.values()), joules)


def _by_gpu(samples: Iterable[DeviceSample]) -> dict[int, dict[str, list[tuple[float, float | None]]]]:
    """By attempt and GPU: its counter, in the order of time."""
    found: dict[int, dict[str, list[tuple[float, float | None]]]] = {}
    for sample in sorted(samples, key=lambda one: one.time):
        for gpu in sample.gpus or ():
            name = gpu.uuid or f"{sample.node}:{gpu.index}"
            found.setdefault(sample.attempt, {}).setdefault(name, []).append((sample.time, gpu.energy_joules))
    return found


def _used(counters: Sequence[tuple[float, float | None]], first: float, last: float) -> float | None:
    """Joules from one time to another. None without two readings: from one alone nothing follows.

    A counter that falls was set back, as by a driver that was loaded anew: it counts from there on.
    """
    read = [(at, value) for at, value in counters if value is not None]
    if len(read) < 2:
        return None
    used = 0.0
    for (began, before), (ended, after) in pairwise(read):
        joules = after - before if after >= before else after
        inside = min(ended, last) - max(began, first)
        used += joules * min(1.0, max(0.0, inside / (ended - began) if ended > began else 1.0))
    return used
