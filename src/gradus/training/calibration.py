"""Calibration: a few real steps of a recipe on the device at hand, timed by kind."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gradus.data.loader import MicroBatch
from gradus.hardware.host import cpu_name
from gradus.parallel.world import alone
from gradus.planner.calibration import Measured
from gradus.record.directory import RunDirectory
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe
from gradus.training.device import limit_memory, rank_device
from gradus.training.live_run import LiveRun
from gradus.training.out_of_memory import out_of_memory_explained
from gradus.training.readback import PendingNumbers

WARM_UP = 2  # steps in which kernels are chosen or compiled, and the allocator finds its size
LEAST_STEPS, MOST_STEPS = 3, 20
ENOUGH_SECONDS = 10.0  # of timed steps
MOST_MICRO_BATCHES = 2  # in a step: more take longer and tell nothing new
LARGEST_CONTEXT = 3 * 2**30  # of a driver: what takes more is other processes on the same GPU


def on_one_rank(recipe: Recipe, plan: Plan) -> tuple[Recipe, Plan]:
    """The recipe and the plan for one rank that works as each of the plan's ranks would: on micro-batches as large.

    What divides the model or the batch over ranks is left out, so the model must fit one device.
    """
    accumulate = min(plan.accumulate, MOST_MICRO_BATCHES)
    undivided = {"mesh": Mesh(), "zero": 0, "offload": "none", "synchronise_every": 1, "ranks_per_gpu": 1}
    undivided |= {"cuda_graph": False}  # forward, backward and update are timed one by one, as they are launched
    undivided |= {"stages_per_rank": 1, "pipeline_schedule": "1f1b", "stage_blocks": None}
    here = plan.model_copy(update={**undivided, "accumulate": accumulate, "checkpoint_every": 10**9})
    budget = {"steps": WARM_UP + MOST_STEPS, "epochs": None, "tokens": None}
    alike = {"batch": plan.micro_batch * accumulate, "hooks": [], "exporters": [], "plan": here}
    return recipe.model_copy(update={**budget, **alike}), here


def measure(recipe: Recipe, plan: Plan) -> Measured:
    """Train on one rank in this process, and throw the result away. Nothing is left on disk."""
    assert plan.mesh.world_size == 1, plan.mesh
    device = rank_device(0)
    limit_memory(device, plan.memory_limit_gib)
    with tempfile.TemporaryDirectory() as folder:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        live = LiveRun.from_recipe(recipe, plan, RunDirectory.create(Path(folder), "measure"), 1, alone(device))
        try:
            with out_of_memory_explained(live):
                steps = _timed_steps(live)
            return _measured(steps, device)
        finally:
            live.recorder.close(state="finished")


@dataclass
class _Marks:
    """Moments of one step, on the device's own clock: its events, or on a CPU the time."""

    start: Any
    waits: list[tuple[Any, Any]] = field(default_factory=list)  # for samples: from, until
    optimizer: Any = None


@dataclass(frozen=True)
class _Seconds:
    total: float
    data: float
    optimizer: float

    @property
    def compute(self) -> float:
        return self.total - self.data - self.optimizer


def _timed_steps(live: LiveRun) -> list[_Seconds]:
    """The seconds of each step after the warm-up. The host runs a step ahead, as it does in a real run."""
    device = live.world.device
    batches = live.loader.micro_batches(0, live.total_steps)
    marks: list[_Marks] = []
    pending: PendingNumbers | None = None
    began = time.monotonic()
    for number in range(live.total_steps):
        made, launched = _launched(live, batches, number)
        marks.append(made)
        if pending is not None:
            pending.wait()
        pending = launched
        if number < WARM_UP:
            began = time.monotonic()
        elif len(marks) >= WARM_UP + LEAST_STEPS and time.monotonic() - began > ENOUGH_SECONDS:
            break
    marks.append(_Marks(_now(device)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [
        _Seconds(
            _between(step.start, following.start),
            sum(_between(*wait) for wait in step.waits),
            _between(step.optimizer, following.start),
        )
        for step, following in itertools.pairwise(marks[WARM_UP:])
    ]


def _launched(live: LiveRun, batches: Iterator[MicroBatch], number: int) -> tuple[_Marks, PendingNumbers]:
    device, step, objective = live.world.device, live.step, live.objective
    assert objective is not None
    marks = _Marks(_now(device))
    for _ in range(step.accumulate):
        asked = _now(device)
        micro = next(batches)
        marks.waits.append((asked, _now(device)))
        with step.forward(micro, number):
            losses = objective(step.model, micro.inputs, micro.samples)
        step.backward(losses.loss_sum, losses.count)
    marks.optimizer = _now(device)
    return marks, step.apply(live.schedule(number), measure_norm=False)


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1000


def _measured(steps: list[_Seconds], device: torch.device) -> Measured:
    middle = statistics.median
    found = Measured(
        device=cpu_name() or "CPU",
        software=f"torch {torch.__version__}",
        steps=len(steps),
        seconds=middle(step.total for step in steps),
        compute_seconds=middle(step.compute for step in steps),
        optimizer_seconds=middle(step.optimizer for step in steps),
        data_seconds=middle(step.data for step in steps),
    )
    if device.type != "cuda":
        return found
    free, whole = torch.cuda.mem_get_info(device)
    context = whole - free - torch.cuda.memory_reserved(device)
    return replace(
        found,
        device=torch.cuda.get_device_name(device),
        allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        context_bytes=context if 0 < context <= LARGEST_CONTEXT else None,
    )
