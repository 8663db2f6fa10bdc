"""The loop: from the present step to the end of the budget, or to a stop request."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gradus.data.loader import MicroBatch
from gradus.training.boundary import Boundary, Ending, Launched
from gradus.training.live_run import LiveRun


def train(live: LiveRun) -> Ending:
    """Train until done. Returns at a step boundary, with a checkpoint of it on disk."""
    state = live.state
    if live.recipe.deterministic and live.world.size > 1 and state.step < live.total_steps:
        live.step.warm_up(live.loader.micro_batches(state.step, state.step + 1))
    batches = TimedBatches(live.loader.micro_batches(state.step, live.total_steps))
    boundary = Boundary(live)
    live.hooks.on_start()
    while True:
        boundary.save_if_out_of_budget()
        if live.evaluator is not None and live.evaluation_due:
            boundary.settle()
            boundary.interrupted = live.evaluate() is None
        ending = boundary.reached()
        if ending is not None:
            return ending
        lr = live.schedule(state.schedule_position())
        waited = batches.waited_seconds
        numbers = live.step.run(batches, state.step, lr, measure_norm=live.recorder.logs(state.step + 1))
        boundary.launched(Launched(state.step, lr, batches.waited_seconds - waited, numbers))


class TimedBatches(Iterator[MicroBatch]):
    """Counts the seconds spent waiting for data."""

    def __init__(self, batches: Iterator[MicroBatch]) -> None:
        self._batches = batches
        self.waited_seconds = 0.0

    def __next__(self) -> MicroBatch:
        began = time.monotonic()
        try:
            return next(self._batches)
        finally:
            self.waited_seconds += time.monotonic() - began
