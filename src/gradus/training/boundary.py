"""Boundary: what happens between two steps, in the loop of a recipe and in a loop of the user's own.

Numbers of the last step are taken in, checkpoints are saved, stop requests answered. It is the one place where a run
saves and ends.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

import numpy as np

from gradus.data.order import past_skipped
from gradus.faults.announcements import NOTICE_STEPS
from gradus.faults.deadline import too_short
from gradus.faults.departures import LeftAlone
from gradus.faults.numerics import StepData, always_overflows, not_a_number, too_many_skipped
from gradus.faults.spikes import Spike, spiked
from gradus.record.format import count_text
from gradus.schema.errors import GradusError
from gradus.training.agreement import Agreement
from gradus.training.gradients import total_norm
from gradus.training.live_run import LiveRun
from gradus.training.profiling import profiling_of
from gradus.training.readback import PendingNumbers, StepNumbers
from gradus.training.rollback import GoBack
from gradus.training.untraced import Untraced

LEAST_LEAD_SECONDS = 10.0  # before the end of a job: to leave after the last checkpoint, which took 4 s on busy cores
PREPARE_STEPS = 50  # before a checkpoint that is due by steps, memory for its copy is made
MOST_SKIPPED_STEPS = 40  # in a row: the loss scale starts at 2**16, and halving it so often leaves nothing


@dataclass(frozen=True)
class Ending:
    state: Literal["finished", "stopped"]
    reason: str


@dataclass(frozen=True)
class Launched:
    """A step that the device may still be working on."""

    step: int
    lr: float
    data_seconds: float
    numbers: PendingNumbers


class Boundary:
    """The state of a run between its steps: what is saved, what is still on its way, whether it is time to end."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._began = time.monotonic()
        self._first_step = self._last_good_step = live.state.step  # good are those whose weights were looked at
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._late: Launched | None = None
        self._agreement = Agreement(live)
        self._untraced: Untraced | None = Untraced()  # until the first step, in which everything is compiled
        self.interrupted = False  # an evaluation was cut short by a stop request
        if live.profiling is None:  # after a rollback there may be one
            live.profiling = profiling_of(live)
        live.recorder.start_clock()
        self._profile()

    @property
    def out_of_budget(self) -> bool:
        return self._live.state.step >= self._live.total_steps

    def launched(self, step: Launched) -> None:
        """A step is on its way. The numbers of the one before are read now, while the device works on this one."""
        self._live.state.step += 1
        self._live.watch.stepped(self._live.state.step, step.data_seconds)
        self.settle()
        self._late = step
        if self._untraced is not None and (given_up := self._untraced.told()) is not None:
            self._live.recorder.event("compilation", message=given_up)
        self._untraced = None
        self._live.hooks.on_step()
        self._agreement.compare_if_due()
        self._profile()

    def _profile(self) -> None:
        """Where a trace is asked for: its steps begin and end here, and what it takes to write them is no step's."""
        profiling, step = self._live.profiling, self._live.state.step
        if profiling is None:
            return
        interrupts = profiling.interrupts(step)
        if interrupts:
            self.settle()
            self._live.watch.where.enter("hooks")  # which may take long
        profiling.at(step)
        if interrupts:
            self._live.recorder.restart_clock()

    def settle(self) -> None:
        """Take in the numbers of the step that was launched last."""
        launched, self._late = self._late, None
        if launched is None:
            return
        live = self._live
        with live.watch.own.waiting_for_device():
            numbers = launched.numbers.wait()
        live.watch.own.settle()
        step, positions = launched.step + 1, live.samples_of(launched.step)
        live.last_loss = numbers.loss
        if numbers.not_finite:
            numbers = self._without(numbers, step)
        else:
            self._check_numbers(numbers, step)
        seconds = live.recorder.step(step, positions.stop, len(positions), launched.lr, launched.data_seconds, numbers)
        self._step_seconds.append(seconds)
        epoch = live.state.epoch.add(positions, live.train_data.length, numbers, seconds)
        if epoch is not None:
            live.recorder.epoch(step, epoch)
        self._check_agreement(self._agreement.taken_in())
        if not numbers.not_finite and live.recipe.on_spike != "ignore":
            spike = live.state.spikes.judge(numbers.loss, live.recipe.spike)
            if spike is not None:
                self._tell_of_spike(spike, step)

    def _check_numbers(self, numbers: StepNumbers, step: int) -> None:
        live = self._live
        self._check_finite("loss", numbers.loss, step)
        if not numbers.overflow:
            self._check_finite("gradient norm", numbers.grad_norm, step)
            return
        live.state.skipped_steps.append(step - 1)
        live.recorder.event(
            "skipped-step",
            step=step,
            scale_before=numbers.scale_before,
            scale_after=numbers.scale_after,
            skipped_steps=len(live.state.skipped_steps),
        )
        self._check_some_steps_happen(step, numbers.scale_after)

    def save_if_out_of_budget(self) -> None:
        """Before the last evaluation: one that fails must not lose what was trained."""
        if self.out_of_budget:
            self._complete()

    def reached(self) -> Ending | None:
        """Save what is due. How the run ends here, if it does."""
        live, state = self._live, self._live.state
        live.watch.where.enter("between-steps")
        live.saving.take_in()
        if live.world.leads:
            self._announce()
        while (committed := live.announcements.taken("committed", state.step)) is not None:
            live.saving.tell(committed)
        saves = live.announcements.due("save", state.step) or self._save_due()
        stops = live.announcements.due("stop", state.step) or self.interrupted
        ends_early = state.evaluation.reason_to_end(live.recipe.evaluate)
        done = not self.interrupted and (self.out_of_budget or ends_early is not None)
        if stops and not done:
            self._check_some_step_fits()
        if stops or done:
            live.departures.tell(state.step)
            self._complete()
        elif saves and not live.saving.has(state.step):
            self._check_weights()
            live.saving.begin()
        elif self._saves_soon():
            live.saving.prepare()
        if done:
            return self._finished(ends_early or f"{count_text(live.total_steps, 'step')} done")
        return self._stopped() if stops else None

    def meet_others(self) -> None:
        """An own loop was left before its budget ended. Raises if other ranks have not left it at the same step."""
        live = self._live
        self.settle()  # after it, no rank waits for this one but for what comes after the last step
        live.watch.where.enter("leaving")
        try:
            with live.watch.own.waiting():
                live.departures.meet(live.state.step)
        except LeftAlone as error:
            self._fail(error)
        live.watch.where.enter("after-loop")

    def left(self, reason: str) -> Ending:
        """An own loop ended before its budget did, by a decision of its own: the run is finished."""
        self._complete()
        return self._finished(reason)

    def _announce(self) -> None:
        """On rank 0: what the clock or somebody outside asks of all ranks."""
        live, step = self._live, self._live.state.step
        if live.stop.deadline is not None:
            live.stop.deadline.lead_seconds = self._lead_seconds()
        if live.stop.seen():
            live.announcements.announce("stop", step)
        if live.interval.due_now() and not live.saving.in_flight:
            live.announcements.announce("save", step)

    def _lead_seconds(self) -> float:
        """How long before the job's end it must be told to stop: ranks stop a few steps later, finish what is being
        written, and write once more."""
        live = self._live
        steps = (NOTICE_STEPS + 2) * max(self._step_seconds, default=1.0)
        saving = live.saving.seconds
        if saving is None:
            saving = live.saving.expected_seconds
        return steps + 2 * saving + LEAST_LEAD_SECONDS

    def _saves_soon(self) -> bool:
        """Whether it is time to make memory for the first copy: not for a run that ends before its first checkpoint."""
        live, interval = self._live, self._live.interval
        if interval.seconds is not None:
            return time.monotonic() - self._began > min(30.0, interval.seconds / 2)
        assert isinstance(interval.every, int)
        next_due = (live.state.step // interval.every + 1) * interval.every
        return live.state.step > 0 and next_due < live.total_steps and next_due - live.state.step <= PREPARE_STEPS

    def _save_due(self) -> bool:
        live, step = self._live, self._live.state.step
        best = live.recipe.checkpoint.best and live.state.evaluation.best_step == step
        return live.interval.due_after(step) or (step > 0 and best)

    def _complete(self) -> None:
        """A checkpoint of this boundary, committed."""
        self._live.saving.complete(self._check_weights)

    def _check_weights(self) -> None:
        """Weights that are no longer numbers must not replace those that were."""
        self.settle()
        live, step = self._live, self._live.state.step
        live.watch.where.enter("saving")
        if step > 0:
            self._check_agreement(self._agreement.compared_now())  # first: then one norm is that of all replicas
            norm = float(total_norm([(p, p.detach()) for p in live.model.parameters()], live.world))
            self._check_finite("norm of the weights", norm, step, self._last_good_step)
        self._last_good_step = step

    def _finished(self, reason: str) -> Ending:
        self._live.recorder.event("finish", step=self._live.state.step, reason=reason)
        self._live.watch.where.enter("hooks")
        self._live.hooks.on_end("finished", reason)
        self._live.saving.close(finished=True)
        return Ending("finished", reason)

    def _stopped(self) -> Ending:
        reason = self._live.stop.reason or "stop requested"
        self._live.recorder.event("stop-request", step=self._live.state.step, reason=reason)
        self._live.watch.where.enter("hooks")
        self._live.hooks.on_end("stopped", reason)
        self._live.saving.close()
        return Ending("stopped", reason)

    def _check_finite(self, what: str, value: float | None, step: int, last_good_step: int | None = None) -> None:
        if value is None or math.isfinite(value):
            return
        live, data = self._live, self._data_of(step)
        live.saving.rescue()
        error = not_a_number(
            what=what,
            value=value,
            step=step,
            last_good_step=step - 1 if last_good_step is None else last_good_step,
            data=data,
            saved_step=live.saving.newest,
            own_loop=live.objective is None,
        )
        if live.recipe.on_nan == "rollback":
            self._go_back("not-a-number", error, step - 1, data)
        self._fail(error)

    def _without(self, numbers: StepNumbers, step: int) -> StepNumbers:
        """With `on_nan: skip`, a bad step has changed nothing: its numbers, as far as they count. Else it ends here."""
        live, state = self._live, self._live.state
        finite = math.isfinite(numbers.loss)
        what, value = ("gradient norm", numbers.grad_norm or math.nan) if finite else ("loss", numbers.loss)
        if live.recipe.on_nan != "skip":
            # Another rank may have seen what is finite here.
            self._check_finite(what, math.nan if math.isfinite(value) else value, step)
        data = self._data_of(step)
        state.skipped_steps.append(step - 1)
        state.not_finite_steps.append(step - 1)
        live.recorder.event(
            "skipped-step",
            step=step,
            kind="not-a-number",
            message=f"step {step} is skipped: the {what} is {value}. Its samples: {data.text}",
            skipped_steps=len(state.skipped_steps),
            **data.fields,
        )
        error = too_many_skipped(state.not_finite_steps, data)
        if error is not None:
            live.saving.rescue()
            self._fail(error)
        return replace(numbers, loss_sum=0.0, count=0.0, grad_norm=None)

    def _tell_of_spike(self, spike: Spike, step: int) -> None:
        live, first = self._live, step - spike.steps + 1
        data = self._data_of(first, step)
        error = spiked(spike, first, step, data, live.saving.newest)
        if live.recipe.on_spike == "rollback":
            self._go_back("loss-spike", error, first - 1, data)
        live.recorder.event("fault", **{**error.document(), "kind": "loss-spike"})

    def _check_agreement(self, error: GradusError | None) -> None:
        """Replicas that do not hold the same any more: one of them computes with wrong numbers."""
        if error is None:
            return
        self._live.saving.rescue()
        if self._live.recipe.on_nan == "rollback":
            self._go_back(error.kind, error, self._agreement.last_step, None)
        self._fail(error)

    def _go_back(self, kind: str, error: GradusError, good_step: int, data: StepData | None) -> NoReturn:
        self._live.recorder.event("fault", **{**error.document(), "kind": kind})
        raise GoBack(kind, error, good_step, data)

    def _data_of(self, first: int, last: int | None = None) -> StepData:
        """The samples of a step (from 1), or of those from one to another."""
        live = self._live
        start, stop = live.samples_of(first - 1).start, live.samples_of((last or first) - 1).stop
        places = past_skipped(np.arange(start, stop), live.state.skipped_positions)
        indices = live.train_data.numbers_of(live.order.at(places))
        return StepData(range(int(places[0]), int(places[-1]) + 1), indices.tolist())

    def _check_some_steps_happen(self, step: int, scale: float | None) -> None:
        last = self._live.state.skipped_steps[-MOST_SKIPPED_STEPS:]
        if len(last) == MOST_SKIPPED_STEPS and last[0] == step - MOST_SKIPPED_STEPS:
            self._fail(always_overflows(step=step, skipped=MOST_SKIPPED_STEPS, scale=scale or 0.0))

    def _check_some_step_fits(self) -> None:
        """An attempt that its deadline ends before the first step would do no better when it is requeued.

        Several ranks get to know of it a few steps ahead, so that each attempt makes some.
        """
        stop, step = self._live.stop, self._live.state.step
        if step == self._first_step and stop.by_deadline and stop.deadline is not None and not self.interrupted:
            self._fail(too_short(stop.deadline, step))

    def _fail(self, error: GradusError) -> NoReturn:
        self._live.recorder.event("fault", **error.document())
        raise error
