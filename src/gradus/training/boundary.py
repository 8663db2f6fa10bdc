"""Boundary: what happens between two steps, in the loop of a recipe and in a loop of the user's own.

Numbers of the last step are taken in, checkpoints are saved, stop requests answered. It is the one place where a run
saves and ends.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal, NoReturn

from gradus.data.order import sample_indices
from gradus.faults.numerics import always_overflows, not_a_number
from gradus.schema.errors import DoNotRestart
from gradus.training.gradients import total_norm
from gradus.training.live_run import LiveRun
from gradus.training.readback import PendingNumbers
from gradus.training.saving import save

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
        self._saved_step = live.checkpoint.step if live.checkpoint else None
        self._last_save = time.monotonic()
        self._late: Launched | None = None
        self.interrupted = False  # an evaluation was cut short by a stop request
        live.recorder.restart_clock()

    @property
    def out_of_budget(self) -> bool:
        return self._live.state.step >= self._live.total_steps

    def launched(self, step: Launched) -> None:
        """A step is on its way. The numbers of the one before are read now, while the device works on this one."""
        self._live.state.step += 1
        self.settle()
        self._late = step
        self._live.hooks.on_step()

    def settle(self) -> None:
        """Take in the numbers of the step that was launched last."""
        launched, self._late = self._late, None
        if launched is None:
            return
        live, numbers = self._live, launched.numbers.wait()
        step, positions = launched.step + 1, live.samples_of(launched.step)
        live.last_loss = numbers.loss
        self._check_finite("loss", numbers.loss, step, positions)
        if numbers.overflow:
            live.state.skipped_steps.append(launched.step)
            live.recorder.event(
                "skipped-step",
                step=step,
                scale_before=numbers.scale_before,
                scale_after=numbers.scale_after,
                skipped_steps=len(live.state.skipped_steps),
            )
            self._check_some_steps_happen(step, numbers.scale_after)
        else:
            self._check_finite("gradient norm", numbers.grad_norm, step, positions)
        seconds = live.recorder.step(step, positions.stop, len(positions), launched.lr, launched.data_seconds, numbers)
        epoch = live.state.epoch.add(positions, live.train_data.length, numbers, seconds)
        if epoch is not None:
            live.recorder.epoch(step, epoch)

    def save_if_out_of_budget(self) -> None:
        """Before the last evaluation: one that fails must not lose what was trained."""
        if self.out_of_budget:
            self._save_unless_saved(required=True)

    def reached(self) -> Ending | None:
        """Save what is due. How the run ends here, if it does."""
        live, state = self._live, self._live.state
        if live.world.leads and live.stop.seen():
            live.announcements.announce("stop", state.step)
        if live.world.leads and live.saves_by_clock and time.monotonic() - self._last_save >= live.checkpoint_seconds:
            live.announcements.announce("save", state.step)
        saves = live.announcements.due("save", state.step) or self._save_due()
        stops = live.announcements.due("stop", state.step) or self.interrupted
        ends_early = state.evaluation.reason_to_end(live.recipe.evaluate)
        done = not self.interrupted and (self.out_of_budget or ends_early is not None)
        if saves or stops or done:
            self._save_unless_saved(required=stops or done)
        if done:
            return self._finished(ends_early or f"{live.total_steps} steps done")
        return self._stopped() if stops else None

    def left(self, reason: str) -> Ending:
        """An own loop ended before its budget did, by a decision of its own: the run is finished."""
        self._save_unless_saved(required=True)
        return self._finished(reason)

    def _save_due(self) -> bool:
        live, step = self._live, self._live.state.step
        every = live.plan.checkpoint_every
        best = live.recipe.checkpoint.best and live.state.evaluation.best_step == step
        return step > 0 and (best or (isinstance(every, int) and step % every == 0))

    def _save_unless_saved(self, required: bool) -> None:
        live, step = self._live, self._live.state.step
        if self._saved_step == step:
            return
        self.settle()
        if step > 0:
            norm = float(total_norm([(p, p.detach()) for p in live.model.parameters()], live.world))
            self._check_finite("norm of the weights", norm, step, live.samples_of(step - 1), self._saved_step or 0)
        if save(live, required):
            self._saved_step = step
            live.hooks.on_checkpoint(live.store.path(step))
        self._last_save = time.monotonic()

    def _finished(self, reason: str) -> Ending:
        self._live.recorder.event("finish", step=self._live.state.step, reason=reason)
        self._live.hooks.on_end("finished", reason)
        return Ending("finished", reason)

    def _stopped(self) -> Ending:
        reason = self._live.stop.reason or "stop requested"
        self._live.recorder.event("stop-request", step=self._live.state.step, reason=reason)
        self._live.hooks.on_end("stopped", reason)
        return Ending("stopped", reason)

    def _check_finite(
        self, what: str, value: float | None, step: int, positions: range, last_good_step: int | None = None
    ) -> None:
        if value is None or math.isfinite(value):
            return
        data, seed = self._live.train_data, self._live.recipe.seed
        indices = data.numbers_of(sample_indices(seed, data.length, positions.start, len(positions)))
        self._fail(
            not_a_number(
                what=what,
                value=value,
                step=step,
                last_good_step=step - 1 if last_good_step is None else last_good_step,
                positions=positions,
                indices=indices.tolist(),
                saved_step=self._saved_step,
            )
        )

    def _check_some_steps_happen(self, step: int, scale: float | None) -> None:
        last = self._live.state.skipped_steps[-MOST_SKIPPED_STEPS:]
        if len(last) == MOST_SKIPPED_STEPS and last[0] == step - MOST_SKIPPED_STEPS:
            self._fail(always_overflows(step=step, skipped=MOST_SKIPPED_STEPS, scale=scale or 0.0))

    def _fail(self, error: DoNotRestart) -> NoReturn:
        self._live.recorder.event("fault", **error.document())
        raise error
