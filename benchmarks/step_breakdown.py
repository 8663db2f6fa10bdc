"""What it costs to know where the time of steps goes: the same run with and without the measuring, in turn.

    python benchmarks/step_breakdown.py --out FOLDER            # on this machine's CPU
    python benchmarks/step_breakdown.py --out FOLDER --small    # a quick check that it runs

One run trains without a break. Every few steps the measuring is taken out of it, or put back: the clock's marks, the
waits that are watched, the lines in `timings/` and the numbers in the metrics. The table shows medians over pairs of
neighbouring segments, so that what changes slowly on the machine changes both. `gpu_breakdown.py` does the same on a
GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gradus.faults.own_time import OwnTime
from gradus.faults.waits import tell_of_waits
from gradus.faults.whereabouts import Whereabouts
from gradus.parallel.world import alone
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.timings import mean_seconds, read_timings
from gradus.schema.recipe import Recipe
from gradus.training.breakdown import Timings
from gradus.training.live_run import LiveRun
from gradus.training.loop import train


@dataclass(frozen=True)
class Work:
    title: str
    document: dict[str, Any]  # of the recipe
    segment: int  # steps
    pairs: int
    warm_up: int


@dataclass(frozen=True)
class Cost:
    title: str
    device: str
    step_ms_without: float
    step_ms_with: float
    cost: float  # median over pairs, as a part of the step
    spread: float  # of the pairs: half of them are within this of the median
    processor_cost: float  # the same of processor time, which other processes on the machine hardly change
    processor_spread: float
    pairs: int
    kinds: dict[str, float]  # of a step, milliseconds


class _Nothing:
    """In place of the clock."""

    on_gpu = False

    def waiting_for_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def nothing(self, *given: object) -> None:
        pass

    settle = stepped = elsewhere = start = seconds = nothing


class Switch:
    """Takes the measuring out of a live run, and puts it back."""

    def __init__(self, live: LiveRun) -> None:
        self._live, self._own, self._timings = live, live.watch.own, live.recorder.timings

    def off(self) -> None:
        self._own.close()
        self._live.watch.own = _Nothing()  # type: ignore[assignment]
        self._live.step.own = None
        self._live.recorder.timings = None

    def on(self) -> None:
        live, own = self._live, self._own
        own._no_more_waits = tell_of_waits(own, on_gpu=own.on_gpu)
        own.where.on_enter = own._phase
        own.start()
        live.watch.own = live.step.own = own
        live.recorder.timings = self._timings
        if self._timings is not None:
            self._timings.forget()


def measured(work: Work, device: torch.device, folder: Path) -> Cost:
    steps = work.warm_up + 2 * work.pairs * work.segment
    document = {"name": "cost", "evaluate": {"batches": 1}, "checkpoint": {"every": steps}, **work.document}
    recipe = resolved(Recipe.from_document({**document, "steps": steps + 1}))
    run = RunDirectory.create(folder, "cost")
    attempt = run.new_attempt()
    live = LiveRun.from_recipe(recipe, recipe.plan, run, attempt, alone(device), watched=False)
    switch = Switch(live)
    times: list[tuple[float, float]] = []  # on the clock, and of the processor by this thread

    def on_step() -> None:
        step = live.state.step - work.warm_up
        if step < 0 or step % work.segment or len(times) > 2 * work.pairs:
            return
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((0.0, 0.0))
        # With first in one pair, without first in the next: A B B A.
        with_now = len(times) % 4 in (1, 0)
        was_with = live.step.own is not None
        if with_now and not was_with:
            switch.on()
        elif was_with and not with_now:
            switch.off()
        times[-1] = (time.perf_counter(), time.thread_time())

    live.hooks.on_step = on_step  # type: ignore[method-assign]
    ending = train(live)
    if live.step.own is None:
        switch.on()
    live.recorder.close(state=ending.state)
    clock, busy = (
        [(later[which] - earlier[which]) / work.segment for earlier, later in pairwise(times)] for which in (0, 1)
    )
    with_it, without = _with(clock), _without(clock)
    middle, spread = _median_and_spread(with_it, without)
    busy_middle, busy_spread = _median_and_spread(_with(busy), _without(busy))
    kinds = mean_seconds([line for line in read_timings(run) if line.step > work.warm_up])
    return Cost(
        work.title,
        str(device),
        statistics.median(without) * 1e3,
        statistics.median(with_it) * 1e3,
        middle,
        spread,
        busy_middle,
        busy_spread,
        len(without),
        {kind: round(seconds * 1e3, 4) for kind, seconds in kinds.items()},
    )


def _with(segments: list[float]) -> list[float]:
    """Segment number n (from 0) began with n + 1 times noted."""
    return [seconds for n, seconds in enumerate(segments) if (n + 1) % 4 in (1, 0)]


def _without(segments: list[float]) -> list[float]:
    return [seconds for n, seconds in enumerate(segments) if (n + 1) % 4 not in (1, 0)]


def _median_and_spread(with_it: list[float], without: list[float]) -> tuple[float, float]:
    shares = [(a - b) / b for a, b in zip(with_it, without, strict=False)]
    middle = statistics.median(shares)
    return middle, statistics.median(abs(share - middle) for share in shares)


def alone_cost(repeats: int) -> dict[str, float]:
    """Microseconds of processor time that the measuring takes by itself: of the clock of a step, and of a line.

    The best of several tries, which what else the machine does hardly changes.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, world, where = RunDirectory.create(Path(folder), "cost"), alone(torch.device("cpu")), Whereabouts()
        own = OwnTime(where, world.device)
        timings = Timings(run, 1, world, own, print)
        own.start()
        number = 0

        def step(*, log: bool) -> None:
            nonlocal number
            number += 1
            where.enter("data")
            where.enter("forward-backward")
            with own.backward():
                pass
            where.enter("optimizer")
            own.stepped(number, 0.0)
            own.settle()
            timings.step(number, 0.01, log=log)

        def seconds_of(log: bool) -> float:
            tries = []
            for _ in range(20):
                began = time.thread_time()
                for _ in range(repeats):
                    step(log=log)
                tries.append((time.thread_time() - began) / repeats)
            return min(tries)

        plain, logged = seconds_of(log=False), seconds_of(log=True)
        where.on_enter = None
        began = time.thread_time()
        for _ in range(repeats):  # the phases are entered anyway
            for phase in ("data", "forward-backward", "optimizer"):
                where.enter(phase)  # type: ignore[arg-type]
        before = (time.thread_time() - began) / repeats
        own.close()
        timings.close()
    return {"clock_of_a_step_us": (plain - before) * 1e6, "line_us": (logged - plain) * 1e6}


def gpt(layers: int, width: int, context: int, batch: int, **plan: Any) -> dict[str, Any]:
    return {
        "model": {"use": "gpt", "layers": layers, "width": width, "heads": max(1, width // 64), "context": context},
        "data": {"use": "synthetic-tokens", "samples": 2048},
        "batch": batch,
        "optimizer": {"use": "adamw", "lr": 1e-4, "clip": 1.0},
        "plan": {"micro_batch": batch, "workers": 0, **plan},
    }


def works(small: bool) -> list[Work]:
    segment, pairs, warm_up = (3, 2, 2) if small else (25, 24, 20)
    return [
        Work("GPT 2 × 64, context 64, batch 4", gpt(2, 64, 64, 4), segment, pairs, warm_up),
        Work("GPT 4 × 128, context 128, batch 8", gpt(4, 128, 128, 8), segment, pairs, warm_up),
        Work(
            "the same, a line for each step",
            {**gpt(4, 128, 128, 8), "log_every": 1},
            segment,
            pairs,
            warm_up,
        ),
    ]


def table(costs: list[Cost]) -> str:
    names = ("work", "step without, ms", "step with, ms", "cost", "cost in processor time", "pairs")
    lines = [f"| {' | '.join(names)} |", "|---|---|---|---|---|---|"]
    for one in costs:
        busy = f"{one.processor_cost:+.2%} ± {one.processor_spread:.2%}"
        lines.append(
            f"| {one.title} | {one.step_ms_without:.3f} | {one.step_ms_with:.3f} | {one.cost:+.2%} ± {one.spread:.2%} "
            f"| {busy} | {one.pairs} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        for work in works(given.small):
            costs.append(measured(work, torch.device("cpu"), Path(folder)))
            print(table(costs[-1:]).splitlines()[-1], flush=True)
    by_itself = alone_cost(20 if given.small else 200)
    document = {"torch": torch.__version__, "threads": torch.get_num_threads(), "by_itself": by_itself}
    document["costs"] = [asdict(cost) for cost in costs]
    (given.out / "step_breakdown.json").write_text(json.dumps(document, indent=1))
    print(f"\n{table(costs)}\n")
    print("by itself: " + ", ".join(f"{name} {value:.1f}" for name, value in by_itself.items()))


if __name__ == "__main__":
    main()
