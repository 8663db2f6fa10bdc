"""The loop: from the present step to the end of the budget, or to a stop request."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NoReturn

from torch.nn.utils import get_total_norm

from gradus.data.loader import MicroBatch
from gradus.data.order import sample_indices
from gradus.faults.numerics import always_overflows, not_a_number
from gradus.parallel.replicate import share_buffers
from gradus.schema.errors import DoNotRestart
from gradus.training.evaluation import evaluate
from gradus.training.live_run import LiveRun
from gradus.training.readback import PendingNumbers

MOST_SKIPPED_STEPS = 40  # in a row: the loss scale starts at 2**16, and halving it so often leaves nothing


@dataclass(frozen=True)
class Ending:
    state: Literal["finished", "stopped"]
    reason: str


def train(live: LiveRun) -> Ending:
    """Train until done. Returns at a step boundary, with a checkpoint of it on disk."""
    state = live.state
    saved_step = live.resumed_step
    if live.recipe.deterministic and live.world.size > 1 and state.step < live.total_steps:
        live.step.warm_up(live.loader.micro_batches(state.step, state.step + 1))
    batches = _TimedBatches(live.loader.micro_batches(state.step, live.total_steps))
    last_save = time.monotonic()
    late: _Launched | None = None
    live.recorder.restart_clock()

    while True:
        # A step boundary: the one place where a run evaluates, saves and ends.
        out_of_budget = state.step >= live.total_steps
        if out_of_budget and saved_step != state.step:  # an evaluation that fails must not lose what was trained
            _settle(live, late, saved_step)
            late, saved_step = None, _saved(live, saved_step, required=True)
        interrupted = False
        if _evaluation_due(live):
            _settle(live, late, saved_step)
            late = None
            interrupted = not _evaluated(live)
        if live.world.leads and live.stop.seen():
            live.announcements.announce("stop", state.step)
        if live.world.leads and live.saves_by_clock and time.monotonic() - last_save >= live.checkpoint_seconds:
            live.announcements.announce("save", state.step)
        saves = live.announcements.due("save", state.step) or _save_due(live)
        stops = live.announcements.due("stop", state.step) or interrupted
        ends_early = state.evaluation.reason_to_end(live.recipe.evaluate)
        done = not interrupted and (out_of_budget or ends_early is not None)
        if (saves or stops or done) and saved_step != state.step:
            _settle(live, late, saved_step)
            late, saved_step = None, _saved(live, saved_step, required=stops or done)
            last_save = time.monotonic()
        if done:
            return _finished(live, ends_early)
        if stops:
            return _stopped(live)

        lr = live.schedule(state.schedule_position())
        waited = batches.waited_seconds
        numbers = live.step.run(batches, state.step, lr, measure_norm=live.recorder.logs(state.step + 1))
        launched = _Launched(state.step, lr, batches.waited_seconds - waited, numbers)
        state.step += 1
        # The numbers of the step before are read now, while the device works on this one.
        _settle(live, late, saved_step)
        late = launched


@dataclass(frozen=True)
class _Launched:
    """A step that the device may still be working on."""

    step: int
    lr: float
    data_seconds: float
    numbers: PendingNumbers


def _settle(live: LiveRun, launched: _Launched | None, saved_step: int | None) -> None:
    """Take in the numbers of a step that was launched before."""
    if launched is None:
        return
    numbers = launched.numbers.wait()
    step, positions = launched.step + 1, live.samples_of(launched.step)
    _check_finite(live, "loss", numbers.loss, step, positions, saved_step)
    if numbers.overflow:
        live.state.skipped_steps.append(launched.step)
        live.recorder.event(
            "skipped-step",
            step=step,
            scale_before=numbers.scale_before,
            scale_after=numbers.scale_after,
            skipped_steps=len(live.state.skipped_steps),
        )
        _check_some_steps_happen(live, step, numbers.scale_after)
    else:
        _check_finite(live, "gradient norm", numbers.grad_norm, step, positions, saved_step)
    live.recorder.step(step, positions.stop, len(positions), launched.lr, launched.data_seconds, numbers)


def _check_finite(
    live: LiveRun,
    what: str,
    value: float | None,
    step: int,
    positions: range,
    saved_step: int | None,
    last_good_step: int | None = None,
) -> None:
    if value is None or math.isfinite(value):
        return
    data = live.train_data
    indices = data.numbers_of(sample_indices(live.recipe.seed, data.length, positions.start, len(positions)))
    error = not_a_number(
        what=what,
        value=value,
        step=step,
        last_good_step=step - 1 if last_good_step is None else last_good_step,
        positions=positions,
        indices=indices.tolist(),
        saved_step=saved_step,
    )
    _fail(live, error)


def _check_some_steps_happen(live: LiveRun, step: int, scale: float | None) -> None:
    last = live.state.skipped_steps[-MOST_SKIPPED_STEPS:]
    if len(last) == MOST_SKIPPED_STEPS and last[0] == step - MOST_SKIPPED_STEPS:
        _fail(live, always_overflows(step=step, skipped=MOST_SKIPPED_STEPS, scale=scale or 0.0))


def _fail(live: LiveRun, error: DoNotRestart) -> NoReturn:
    live.recorder.event("fault", **error.document())
    raise error


def _evaluation_due(live: LiveRun) -> bool:
    """Every so many steps and at the end, once for each step, also if a stop request cut it short the last time."""
    step, every = live.state.step, live.recipe.evaluate.every
    due = step >= live.total_steps or (every is not None and step > 0 and step % every == 0)
    return due and live.evaluator is not None and live.state.evaluation.evaluated_step != step


def _evaluated(live: LiveRun) -> bool:
    """Whether the evaluation ran to its end."""
    assert live.evaluator is not None
    share_buffers(live.model, live.world)
    began = time.monotonic()
    results = evaluate(
        live.model,
        live.objective,
        live.evaluator.loader,
        live.evaluator.batches,
        live.numbers,
        live.world,
        live.stop,
    )
    if results is not None:
        live.recorder.evaluation(live.state.step, results, time.monotonic() - began)
        live.state.evaluation.note(live.state.step, results, live.recipe.evaluate)
    live.recorder.restart_clock()
    return results is not None


def _save_due(live: LiveRun) -> bool:
    every, step = live.plan.checkpoint_every, live.state.step
    best = live.recipe.checkpoint.best and live.state.evaluation.best_step == step
    return step > 0 and (best or (isinstance(every, int) and step % every == 0))


def _saved(live: LiveRun, saved_step: int | None, required: bool) -> int | None:
    """Save the present step; returns the step of the newest checkpoint."""
    step = live.state.step
    if step > 0:
        norm = float(get_total_norm(live.model.parameters()))
        _check_finite(live, "norm of the weights", norm, step, live.samples_of(step - 1), saved_step, saved_step or 0)
    return step if live.save(required) else saved_step


def _finished(live: LiveRun, ends_early: str | None) -> Ending:
    reason = ends_early or f"{live.total_steps} steps done"
    live.recorder.event("finish", step=live.state.step, reason=reason)
    return Ending("finished", reason)


def _stopped(live: LiveRun) -> Ending:
    reason = live.stop.reason or "stop requested"
    live.recorder.event("stop-request", step=live.state.step, reason=reason)
    return Ending("stopped", reason)


class _TimedBatches(Iterator[MicroBatch]):
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
