"""The loop: from the present step to the end of the budget, or to a stop request."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from gradus.data.loader import MicroBatch
from gradus.faults.whereabouts import Whereabouts
from gradus.training.boundary import Boundary, Ending, Launched
from gradus.training.live_run import LiveRun
from gradus.training.narrow_refusal import NarrowTrial
from gradus.training.rollback import GoBack, roll_back


def train(live: LiveRun) -> Ending:
    """Train until done. Returns at a step boundary, with a checkpoint of it on disk."""
    while True:
        found = _train(live)
        if isinstance(found, Ending):
            live.watch.close()
            return found
        roll_back(live, found)


def _train(live: LiveRun) -> Ending | GoBack:
    """From where the run is to its end, or to a step from which it has to go back."""
    state = live.state
    if live.recipe.deterministic and live.world.size > 1 and state.step < live.total_steps:
        live.step.warm_up(live.loader.micro_batches(state.step, state.step + 1))
    if live.plan.narrow_weights and live.step.has_narrow_weights:
        fixed = "narrow_weights" in live.recipe.plan.fixed
        live.step.trial = NarrowTrial(live.step, live.warn, fixed=fixed)
    samples = live.samples.noted(live.loader.micro_batches(state.step, live.total_steps))
    batches = TimedBatches(samples, live.watch.where)
    boundary = Boundary(live)
    try:
        live.watch.where.enter("hooks")
        live.hooks.on_start()
        return _steps(live, boundary, batches)
    except GoBack as back:
        return back.with_traceback(None)  # whose frames hold batches that are on the device
    finally:
        batches.close()


def _steps(live: LiveRun, boundary: Boundary, batches: TimedBatches) -> Ending:
    state = live.state
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
    """Counts the seconds spent waiting for data. What comes after a batch is its forward and backward pass."""

    def __init__(self, batches: Iterator[MicroBatch], where: Whereabouts) -> None:
        self._batches = batches
        self._where = where
        self.waited_seconds = 0.0

    def __next__(self) -> MicroBatch:
        self._where.enter("data")
        began = self._where.since
        try:
            return next(self._batches)
        finally:
            self._where.enter("forward-backward")
            self.waited_seconds += self._where.since - began

    def close(self) -> None:
        """No more of them: what fetches ahead ends."""
        if isinstance(self._batches, Generator):
            self._batches.close()
