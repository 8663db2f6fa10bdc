"""Evidence: all that a run, or a trace alone, has left to judge by. Each part is read when it is asked for, once.

Everything may be missing: a run of an older version has no timings, a script no recipe, a run that died no metrics.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from gradus.diagnosis.finding import Confidence
from gradus.launcher.run_logs import log_files
from gradus.launcher.script import COMMAND_FILE, Script
from gradus.launcher.story import local_state
from gradus.planner.defaults import ranks_on_a_node
from gradus.record.device_log import read_device_samples
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.few_lines import few_lines
from gradus.record.metrics import merge_by_step
from gradus.record.outcome import read_outcome
from gradus.record.status import Status, read_status
from gradus.record.timings import by_rank, mean_seconds, mean_step_seconds, read_timings
from gradus.schema.breakdown import Breakdown
from gradus.schema.cluster import Cluster
from gradus.schema.device_sample import DeviceSample
from gradus.schema.errors import GradusError
from gradus.schema.plan import Plan
from gradus.schema.prediction import PREDICTION_FILE, Prediction
from gradus.schema.recipe import OWN, Recipe

if TYPE_CHECKING:
    from gradus.diagnosis.timeline.analysis import TraceAnalysis

Read = TypeVar("Read")

# First steps of an attempt: kernels are chosen or compiled, workers start, the allocator finds its size.
WARM_UP_STEPS = 3
LOG_BYTES = 1 << 20
FEW_WINDOWS = 4  # of so few, the last one is too large a part to leave anything out of it
LEAST_SAMPLED_SECONDS = 0.5  # over which the rise of a counter says something
FEWEST_RATES = 3  # between samples, of which the middle one is what is usual
# Fewer measured steps than this tell little.
ENOUGH_STEPS = 10
# And of fewer than this, one or two slow ones make the median: they are not judged by time at all.
FEWEST_STEPS = 5


@dataclass(frozen=True)
class Evidence:
    """Of a run, of traces, or of both."""

    run: RunDirectory | None = None
    trace_paths: tuple[Path, ...] = ()
    is_watched: bool = False  # looked at again and again: what the scheduler said a few seconds ago will do

    @classmethod
    def of_run(cls, run: RunDirectory) -> Evidence:
        return cls(run, tuple(sorted((run.path / "traces").glob("*.json*"))))

    @classmethod
    def of_trace(cls, path: Path) -> Evidence:
        return cls(None, (path,))

    @cached_property
    def attempt(self) -> int:
        """The newest one; 0 where there is none."""
        return max(self.run.attempts, default=0) if self.run else 0

    @property
    def attempt_path(self) -> Path | None:
        """Where the newest attempt is described, or the job that is to make the first one."""
        if self.run is None:
            return None
        return self.run.attempt_path(self.attempt) if self.attempt else self.run.job

    @cached_property
    def recipe(self) -> Recipe | None:
        return _read(Recipe.load, self._file("recipe.yaml"))

    @cached_property
    def plan(self) -> Plan | None:
        return _read(Plan.load, self._file("plan.yaml"))

    @cached_property
    def cluster(self) -> Cluster | None:
        return _read(Cluster.load, self._file("cluster.yaml"))

    @cached_property
    def prediction(self) -> Prediction | None:
        return _read(Prediction.load, self._file(PREDICTION_FILE))

    @cached_property
    def environment(self) -> dict[str, Any]:
        found: dict[str, Any] | None = _read(lambda path: json.loads(path.read_text()), self._file("environment.json"))
        return found or {}

    @cached_property
    def script(self) -> Script | None:
        """What was run, if it was no recipe."""
        return _read(Script.load, self._file(COMMAND_FILE))

    def profiling(self, request: str) -> str:
        """The command that makes such a run anew with a trace of what is requested; a job's size is to be added."""
        submitted = self.run is not None and self.run.job.is_dir()
        if self.script is None:
            return f"gradus {'submit' if submitted else 'train'} --profile {request}"
        verb = "submit" if submitted else f"train --nproc {self.script.ranks}"
        return f"gradus {verb} --profile {request} -- {self.script.text}"

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, one for each logged step, of all attempts; of very many, enough to judge by."""
        return merge_by_step(few_lines(self.run.metrics_path)) if self.run else []

    @cached_property
    def timings(self) -> list[Breakdown]:
        """Of all ranks in the newest attempt that has any."""
        if self.run is None:
            return []
        for attempt in reversed(self.run.attempts):
            found = read_timings(self.run, attempt)
            if found:
                return found
        return []

    @cached_property
    def steady(self) -> list[Breakdown]:
        """Timings without steps that are not representative: the first of the attempt, and those that were traced.

        All, if there are no others. What saving and evaluating at the end took is left out.
        """
        first = min((one.step - one.steps for one in self.timings), default=0)
        plain = [one for one in self.timings if not self._was_traced(one)] or self.timings
        later = [one for one in plain if one.step - one.steps >= first + WARM_UP_STEPS]
        # With windows of many steps, the one that holds the first steps may be most of what there is.
        if sum(one.steps for one in later) * 2 < sum(one.steps for one in plain):
            later = [one for one in plain if one.step - one.steps > first]
        return _without_the_end(later or plain)

    def _was_traced(self, one: Breakdown) -> bool:
        """Whether a profiler was at work in the window, or wrote its trace; the other ranks waited for it."""
        return any(begin <= one.step and one.step - one.steps <= end for begin, end in self._traced_steps)

    @cached_property
    def _traced_steps(self) -> list[tuple[int, int]]:
        return [
            (int(event["first_step"]), int(event["last_step"]))
            for event in self.last_events
            if event.get("event") == "profile" and "first_step" in event and "last_step" in event
        ]

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Mean seconds of a step by kind, over ranks and steady steps."""
        return mean_seconds(self.steady)

    @cached_property
    def step_seconds(self) -> float | None:
        return mean_step_seconds(self.steady)

    @property
    def judged_step_seconds(self) -> float | None:
        """The same, where there are enough steps to call anything slow by."""
        return self.step_seconds if self.steps_measured >= FEWEST_STEPS else None

    @property
    def training_seconds(self) -> float | None:
        """Of a step, without saving and evaluating: in a short run, those at its end would hide everything else."""
        if self.step_seconds is None:
            return None
        return self.step_seconds - self.seconds["checkpoint"] - self.seconds["evaluation"]

    @cached_property
    def steps_measured(self) -> int:
        """How many steady steps the numbers rest on."""
        return min((sum(one.steps for one in own) for own in by_rank(self.steady).values()), default=0)

    @property
    def confidence(self) -> Confidence:
        """Of what follows from the timings alone."""
        return "high" if self.steps_measured >= ENOUGH_STEPS else "low"

    def share(self, kind: str) -> float:
        """Of the step's time."""
        return self.seconds.get(kind, 0.0) / self.step_seconds if self.step_seconds else 0.0

    def by_rank(self, kind: str) -> dict[int, float]:
        """Mean seconds of a step that each rank spent on a kind."""
        return {rank: mean_seconds(own)[kind] for rank, own in by_rank(self.steady).items()}

    @cached_property
    def own_seconds(self) -> dict[int, float]:
        """By rank: what it needs for its own part of a step, waits for others taken off; the median of its windows.

        Only ranks that measured it.
        """
        measured = {
            rank: [one.own_seconds for one in own if one.own_seconds is not None]
            for rank, own in by_rank(self.steady).items()
        }
        return {rank: median(found) for rank, found in measured.items() if found}

    @property
    def ranks(self) -> int:
        """How many take part, as far as is known."""
        if self.plan is not None:
            return self.plan.mesh.world_size
        if self.script is not None:
            return self.script.ranks
        return len({one.rank for one in self.timings}) or 1

    @cached_property
    def device_samples(self) -> list[DeviceSample]:
        """Of the newest attempt, while its steady steps ran; all of it, where no steps were timed."""
        if self.run is None or not self.attempt:
            return []
        samples = read_device_samples(self.run, self.attempt)
        begin, end = self._steady_span
        inside = [one for one in samples if begin <= one.time <= end]
        return inside if len(inside) > 1 else samples  # of a run of seconds, there may be one every other second

    @property
    def _steady_span(self) -> tuple[float, float]:
        if not self.steady:
            return 0.0, float("inf")
        return (
            min(one.time - one.steps * one.step_seconds for one in self.steady),
            max(one.time for one in self.steady),
        )

    @cached_property
    def start(self) -> dict[str, Any]:
        """What the ranks of the newest attempt said when they began: device, threads, parameters."""
        return next((event for event in reversed(self.last_events) if event.get("event") == "start"), {})

    @property
    def is_own_loop(self) -> bool:
        """Whether a script of the user's makes the steps, with `gradus.Run`: it also makes the recipe."""
        return self.recipe is not None and self.recipe.model.use == OWN

    @property
    def has_gpu(self) -> bool:
        """Whether it trains, or trained, on GPUs, as far as is known."""
        if "device" in self.start:
            return bool(self.start["device"] == "cuda")
        if any(one.memory_reserved_bytes is not None for one in self.timings):
            return True
        if any(trace.device == "cuda" for trace in self.traces):
            return True
        return bool(self.environment.get("gpus")) and (self.cluster is None or self.cluster.gpus_per_node > 0)

    @property
    def workers(self) -> int | None:
        """Processes that load data for each rank; None where nobody said."""
        told = [
            event["workers"] for event in self.last_events if event.get("event") == "workers" and "workers" in event
        ]
        if told:
            return int(told[-1])
        return self.plan.workers if self.plan is not None and isinstance(self.plan.workers, int) else None

    @property
    def ranks_on_a_node(self) -> int:
        if self.plan is None or self.cluster is None:
            return self.ranks
        return min(self.ranks, ranks_on_a_node(self.cluster, self.plan))

    @cached_property
    def cores(self) -> int | None:
        """Of a node, that the job may use."""
        known = [one.host.cores for one in self.device_samples if one.host.cores]
        return min(known) if known else self.cluster.cpu_cores if self.cluster else None

    @cached_property
    def cores_used(self) -> float | None:
        """By the ranks of a node and what they started, on average while steady steps ran; of the busiest node."""
        used = [rate for rate in self._rates("ranks_cpu_seconds").values() if rate is not None]
        return max(used) if used else None

    @cached_property
    def read_bytes_per_second(self) -> float | None:
        """From storage, by the ranks of the node that reads most; what is usual between two samples.

        Not the mean: libraries that are loaded when they are first needed are read once, and at once.
        """
        usual = [
            median(rates)
            for points in self._readings("read_bytes").values()
            if len(rates := [rate for pair in pairwise(points) if (rate := _slope(pair)) is not None]) >= FEWEST_RATES
        ]
        return max(usual) if usual else None

    def _rates(self, counter: str) -> dict[str, float | None]:
        """By node: how fast a counter of its host rises."""
        return {node: _slope(points) for node, points in self._readings(counter).items()}

    def _readings(self, counter: str) -> dict[str, list[tuple[float, float]]]:
        """By node: when a counter of its host was read, and what it said."""
        readings: dict[str, list[tuple[float, float]]] = {}
        for sample in self.device_samples:
            value = getattr(sample.host, counter)
            if value is not None:
                readings.setdefault(sample.node, []).append((sample.time, value))
        return readings

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Of all attempts, in the order of time."""
        return read_events(self.run) if self.run else []

    @property
    def last_events(self) -> list[dict[str, Any]]:
        """Of the newest attempt."""
        return [event for event in self.events if event.get("attempt", self.attempt) == self.attempt]

    @cached_property
    def status(self) -> Status | None:
        return read_status(self.run) if self.run else None

    @property
    def state(self) -> str:
        """running, finished, failed, stopped, lost, queued, or unknown."""
        return local_state(self.status)

    @cached_property
    def outcome(self) -> dict[str, Any] | None:
        """How the newest attempt ended, as its ranks said; its `error` where it failed."""
        return read_outcome(self.run, self.attempt) if self.run and self.attempt else None

    @cached_property
    def traces(self) -> Sequence[TraceAnalysis]:
        """What traces show, one for each file, those of the newest attempt if there are any of it.

        A run is judged without a trace that cannot be read; of a trace alone, that is the answer.
        """
        from gradus.diagnosis.timeline.analysis import analyse

        if self.run is None:
            return tuple(analyse(path) for path in self.trace_paths)
        mark = f"attempt-{self.attempt}-"
        newest = [path for path in self.trace_paths if path.name.startswith(mark)] or self.trace_paths
        return tuple(found for path in newest if (found := _read(analyse, path)) is not None)

    @cached_property
    def log_beginnings(self) -> dict[str, str]:
        """By file name: what the newest attempt printed first; NCCL says there how it is connected."""
        if self.run is None:
            return {}
        return {path.name: _read(_beginning, path) or "" for path in log_files(self.run)}

    def _file(self, name: str) -> Path | None:
        return self.attempt_path / name if self.attempt_path is not None else None


def _without_the_end(timings: list[Breakdown]) -> list[Breakdown]:
    """The last window also has the save and the evaluation at the end: in a short run they would hide all else."""
    last = max((one.step for one in timings), default=0)
    if len({one.step for one in timings}) < FEW_WINDOWS:
        return timings
    return [_without_interludes(one) if one.step == last else one for one in timings]


def _without_interludes(one: Breakdown) -> Breakdown:
    left = {kind: 0.0 if kind in ("checkpoint", "evaluation") else seconds for kind, seconds in one.seconds.items()}
    return one.model_copy(update={"seconds": left, "step_seconds": sum(left.values())})


def _beginning(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(LOG_BYTES).decode(errors="replace")


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Of a counter between its first and last reading; None from too short a time."""
    (begin, first), (end, last) = points[0], points[-1]
    return max(0.0, last - first) / (end - begin) if end - begin >= LEAST_SAMPLED_SECONDS else None


def _read(reader: Callable[[Path], Read], path: Path | None) -> Read | None:
    """What a file says, or None: a run that died, or of another version, may have half of it."""
    if path is None or not path.is_file():
        return None
    try:
        return reader(path)
    except (GradusError, OSError, ValueError, KeyError, TypeError):
        return None
