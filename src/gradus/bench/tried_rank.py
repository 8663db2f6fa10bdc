"""A rank of trials: builds what it is told on its stdin, trains a few steps, answers on its stdout, and waits.

`python -m gradus.bench.tried_rank`, with the variables that torchrun sets.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import resource
import signal
import statistics
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradus.faults.parent import end_with_parent
from gradus.parallel.world import World, connected, store_from_environment
from gradus.record.directory import RunDirectory
from gradus.record.format import error_text, first_line
from gradus.schema.errors import InputError
from gradus.schema.loading import validated
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe
from gradus.training.device import limit_memory, rank_device
from gradus.training.live_run import LiveRun
from gradus.training.loop import TimedBatches
from gradus.training.out_of_memory import is_out_of_memory
from gradus.training.readback import PendingNumbers

_LEAST_WINDOWS = 3
_LEFT_OVER_BYTES = 256 << 20  # on a GPU, that a process may hold after a trial and still be used for the next
_FEW_SAMPLES = 2  # batch normalisation needs more than one
_loaded: list[bool] = []  # whether this process has made a trial
_NO_MEMORY = ("bad_alloc", "Cannot allocate memory")


@dataclass
class _Times:
    ends: list[float] = field(default_factory=list)  # when each step was over
    waits: list[float] = field(default_factory=list)  # for samples, in each step
    losses: list[float] = field(default_factory=list)


def answer(asked: dict[str, Any], store: Store) -> dict[str, Any]:
    """Train as asked, whatever comes of it."""
    rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    try:
        plan = validated(Plan, asked["plan"], "plan")
        device = rank_device(local_rank, plan.ranks_per_gpu)
        _limit(device, plan)
        trial = PrefixStore(f"trial-{asked['number']}", store)
        with connected(rank, local_rank, size, device, trial, shares_gpu=plan.ranks_per_gpu > 1) as world:
            try:
                _load_all(asked, plan, world)
                with _host_memory(asked["host_memory_bytes"] if device.type == "cpu" else None):
                    return _measured(asked, plan, world)
            except Exception as error:
                if size == 1:
                    raise
                # Closing the group would wait for peers that are stuck in a collective with this rank.
                return _failure(error)
    except Exception as error:
        return _failure(error)


def _load_all(asked: dict[str, Any], plan: Plan, world: World) -> None:
    """On a CPU, memory is that of the process: what is loaded at the first use must not count as the first trial's.

    So two steps on few samples come first.
    """
    if world.device.type != "cpu" or _loaded:
        return
    _loaded.append(True)
    few = plan.model_copy(update={"micro_batch": min(_FEW_SAMPLES, plan.micro_batch), "workers": 0})
    batch = few.micro_batch * few.accumulate * few.mesh.data_ranks
    short = {"warm_up": 1, "whole": True, "evaluate": False, "recipe": {**asked["recipe"], "steps": 2, "batch": batch}}
    _measured({**asked, **short}, few, world)
    _cleaned_up()


def _measured(asked: dict[str, Any], plan: Plan, world: World) -> dict[str, Any]:
    recipe = Recipe.from_document(asked["recipe"])
    before = _reset_peak(world.device)
    live = LiveRun.from_recipe(recipe, plan, RunDirectory(Path(asked["run"])), 1, world, watched=False)
    try:
        times = _train(live, asked)
        evaluation = live.measure() if asked["evaluate"] and live.evaluator is not None else None
        window, untimed = asked["window"], _untimed(asked)
        return {
            "state": "measured",
            "step_seconds": _windows(times.ends[untimed - 1 :], window),
            "data_seconds": statistics.fmean(times.waits[untimed:]),
            "memory_bytes": _peak(world.device, before),
            "losses": times.losses,
            "evaluation": evaluation or {},
            "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        }
    finally:
        live.watch.close()
        live.recorder.close(state="finished")


def _train(live: LiveRun, asked: dict[str, Any]) -> _Times:
    """The host runs a step ahead, as it does in a real run."""
    times, pending = _Times(), None
    batches = TimedBatches(live.loader.micro_batches(0, live.total_steps), live.watch.where)
    steps = live.total_steps
    number = 0
    try:
        while number < steps:
            waited = batches.waited_seconds
            launched = live.step.run(batches, number, live.schedule(number), measure_norm=False)
            times.waits.append(batches.waited_seconds - waited)
            if pending is not None:
                _arrived(pending, times)
            pending = launched
            number += 1
            if number == _untimed(asked) and not asked["whole"]:
                steps = _enough(live.world, times, steps, asked)
        assert pending is not None
        _arrived(pending, times)
    finally:
        batches.close()
    return times


def _arrived(pending: PendingNumbers, times: _Times) -> None:
    numbers = pending.wait()
    times.ends.append(numbers.done_at)
    times.losses.append(numbers.loss)


def _untimed(asked: dict[str, Any]) -> int:
    """First steps that do not count: `Trial.untimed`."""
    return int(asked["warm_up"]) + (0 if asked["whole"] else int(asked["window"]))


def _windows(ends: list[float], window: int) -> list[float]:
    """The mean seconds of a step in each whole window; of what is left over, only where there is nothing else."""
    marks = ends[::window] if len(ends) > window else [ends[0], ends[-1]]
    size = window if len(ends) > window else len(ends) - 1
    return [(after - before) / size for before, after in itertools.pairwise(marks)]


def _enough(world: World, times: _Times, planned: int, asked: dict[str, Any]) -> int:
    """How many steps in all, by the window before the timed ones. The ranks must agree, so they go by their mean."""
    window = asked["window"]
    ends = times.ends[-(window + 1) :]  # the last step's numbers are still on their way
    seconds = (ends[-1] - ends[0]) / max(1, len(ends) - 1) * window
    mean = world.sum_(torch.tensor([seconds], dtype=torch.float64, device=world.device)).item() / world.size
    wanted = round(asked["seconds"] / mean) if mean > 0 else planned
    return int(min(planned, _untimed(asked) + window * max(_LEAST_WINDOWS, wanted)))


def _failure(error: Exception) -> dict[str, Any]:
    traceback.print_exception(error)  # for whoever reads stderr
    cause: BaseException | None = error
    while cause is not None:
        if is_out_of_memory(cause) or isinstance(cause, MemoryError) or any(word in str(cause) for word in _NO_MEMORY):
            return {"state": "out-of-memory", "why": first_line(error)}
        cause = cause.__cause__
    if isinstance(error, InputError):
        return {"state": "refused", "why": first_line(error)}
    return {"state": "failed", "why": error_text(error)}


def _limit(device: torch.device, plan: Plan) -> None:
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)  # the trial before may have had less
    limit_memory(device, plan.memory_limit_gib)


@contextlib.contextmanager
def _host_memory(limit: int | None) -> Iterator[None]:
    """Let the process have so much more memory than it has now: torch is told so, and the kernel need not kill it."""
    if limit is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _status("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _reset_peak(device: torch.device) -> int:
    """Start counting. Returns what a CPU process holds already."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
    return _status("VmRSS")


def _peak(device: torch.device, before: int) -> int | None:
    """Of a GPU what torch held at most; of a CPU process the resident memory beyond what it had at the start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _cleaned_up() -> bool:
    """Whether the next trial may be in this process."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    for _ in range(2):
        gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return True
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() < _LEFT_OVER_BYTES


def main() -> None:
    end_with_parent(signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the user's code prints is no answer
    store = store_from_environment()
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        said = answer(json.loads(line), store)
        sys.stdout.flush()
        answers.write(json.dumps({**said, "reusable": _cleaned_up()}) + "\n")
    os._exit(0)  # without tearing torch down, whose threads now and then abort


if __name__ == "__main__":
    main()
