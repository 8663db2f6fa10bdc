"""Breakdown of steps: where the time of this rank's steps went, written down for each log window.

A window ends with a logged step, but not before it is long enough that its line does not show. What comes after it, an
evaluation or a save, is in the next one; of the last, in a line that replaces the one before.

On a CPU everything is read off the clock. On a GPU the wall-clock time of each step is known from the arrival of its
numbers; waits for data in it from events in every step; saves and evaluations from the host's clock, since the device
waits for them. The rest is divided as in the steps that were measured in detail, of this window or the last that had
any.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradus.faults.own_time import OwnTime
from gradus.parallel.world import World
from gradus.record.directory import RunDirectory
from gradus.record.node import node_name
from gradus.record.problem import OnProblem
from gradus.record.timings import TimingLog
from gradus.schema.breakdown import KINDS

FETCHING = ("data", "host_to_device")
INTERLUDES = ("checkpoint", "evaluation")  # between steps: the device has nothing else to do
# A line takes some 40 microseconds (one core of an EPYC, a local disk, November 2026): shorter steps share one.
LEAST_SECONDS = 0.01
DEVICE_KINDS = tuple(kind for kind in KINDS if kind not in (*FETCHING, *INTERLUDES))


class Window:
    """Sums over the steps since the last line."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0  # of the steps, without what was between them
        self.host = dict.fromkeys(KINDS, 0.0)
        self.fetching = 0.0
        self.between = 0.0
        self.measured: list[Mapping[str, float]] = []

    def on_cpu(self) -> dict[str, float]:
        """Seconds by kind of all steps together."""
        return dict(self.host)

    def on_gpu(self, measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """The same, divided as in the `measured` steps."""
        fetching = min(self.fetching, self.seconds)
        interludes = {kind: self.host[kind] for kind in INTERLUDES}
        known = {kind: sum(step[kind] for step in measured) for kind in KINDS}
        found = {
            **_divided(fetching, {kind: known[kind] for kind in FETCHING}, otherwise="data"),
            **_divided(self.seconds - fetching, {kind: known[kind] for kind in DEVICE_KINDS}, otherwise="other"),
            **interludes,
        }
        found["other"] += max(0.0, self.between - sum(interludes.values()))
        return {kind: found[kind] for kind in KINDS}


class Timings:
    """The account of one rank, in its own file."""

    def __init__(self, run: RunDirectory, attempt: int, world: World, own: OwnTime, on_problem: OnProblem) -> None:
        self._own, self._device = own, world.device
        self._about = {"attempt": attempt, "rank": world.rank, "node": node_name()}
        self._log = TimingLog(run, world.rank, on_problem)
        self._window = Window()
        self._last: dict[str, Any] | None = None  # that was written
        self._last_step = 0
        self._last_measured: list[Mapping[str, float]] = []

    def step(self, step: int, seconds: float, *, log: bool) -> dict[str, float] | None:
        """A step that is over took so long. Where its window ends, the mean seconds of the window by kind."""
        window, self._last_step = self._window, step
        window.steps += 1
        window.seconds += seconds
        for times in self._own.ended_until(step):
            window.fetching += times.fetching or 0.0
            for kind, spent in times.host.items():
                window.host[kind] += spent
        self._own.settle()
        window.measured += self._own.measured()
        return self._write() if log and window.seconds >= LEAST_SECONDS else None

    def between_steps(self, seconds: float) -> None:
        """So long the device had no step to work on."""
        self._window.between += seconds

    def forget(self) -> None:
        """The run goes back: what was not written yet is no part of it any more."""
        self._window = Window()

    def close(self) -> list[str]:
        """Write down what came after the last line. Returns what could not be written."""
        window, rest = self._window, self._own.since_last_step()
        after = {kind: rest.get(kind, 0.0) for kind in INTERLUDES}
        if window.steps:
            for kind, seconds in after.items():
                window.host[kind] += seconds
            self._write()
        elif self._last is not None and sum(after.values()) > 0:
            self._last = with_more(self._last, after)
            self._log.write_document(self._last)
        return self._log.close()

    def _write(self) -> dict[str, float]:
        window, self._window = self._window, Window()
        measured = window.measured or self._last_measured
        self._last_measured = measured
        seconds = window.on_gpu(measured) if self._own.on_gpu else window.on_cpu()
        mean = {kind: spent / window.steps for kind, spent in seconds.items()}
        waits = {"exposed_communication", *INTERLUDES}
        own = sum(mean[kind] for kind in KINDS if kind not in waits)
        known = not self._own.on_gpu or bool(window.measured)
        self._last = {
            "time": time.time(),
            **self._about,
            "step": self._last_step,
            "steps": window.steps,
            "measured_steps": len(window.measured) if self._own.on_gpu else window.steps,
            "step_seconds": sum(mean.values()),
            "seconds": mean,
            **({"own_seconds": own} if known else {}),
            **_memory(self._device),
        }
        self._log.write_document(self._last)
        return mean


def with_more(line: Mapping[str, Any], after: Mapping[str, float]) -> dict[str, Any]:
    """A line whose last step was followed by so many seconds of other kinds."""
    mean = {kind: spent + after.get(kind, 0.0) / line["steps"] for kind, spent in line["seconds"].items()}
    return {**line, "time": time.time(), "seconds": mean, "step_seconds": sum(mean.values())}


def metrics_of(mean: Mapping[str, float]) -> dict[str, float]:
    """What a line of metrics.jsonl has of them. `data_seconds` is there, and `evaluation_seconds` is a whole one's."""
    kinds = [kind for kind in KINDS if kind not in ("data", "evaluation")]
    return {f"{kind}_seconds": mean[kind] for kind in kinds}


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has used so far: tensors on a GPU, or resident memory of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {"memory_peak_bytes": peak_memory_bytes(device)}
    # As torch keeps them: memory_stats() would sort some hundred numbers for these three.
    kept = torch.cuda.memory_stats_as_nested_dict(device)
    if not kept:
        return {}
    return {
        "memory_peak_bytes": kept["allocated_bytes"]["all"]["peak"],
        "memory_reserved_bytes": kept["reserved_bytes"]["all"]["current"],
        "memory_retries": kept["num_alloc_retries"],
    }


def _divided(seconds: float, parts: Mapping[str, float], otherwise: str) -> dict[str, float]:
    """Seconds in the proportions of the parts; all of them to one where nothing is known of those."""
    total = sum(parts.values())
    if total <= 0:
        return {kind: seconds if kind == otherwise else 0.0 for kind in parts}
    return {kind: seconds * part / total for kind, part in parts.items()}
