"""Rollback: a live run goes back to its last good checkpoint and on from there, without the samples that broke it.

A boundary raises `GoBack`, on all ranks at the same step. What was trained since the checkpoint is given up; the model
is built anew and the checkpoint put in place, as when a run is resumed, so that it goes on bit for bit as a run that
was resumed there with `data.skip` would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gradus.checkpoint.retention import set_aside
from gradus.faults.numerics import StepData
from gradus.faults.rollback_log import MOST_ROLLBACKS, Rollback, note_rollback, read_rollbacks
from gradus.schema.errors import DoNotRestart, GradusError, InputError
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe
from gradus.training.resuming import step_back
from gradus.training.trained_samples import TrainedSamples

if TYPE_CHECKING:
    from gradus.training.live_run import LiveRun


class GoBack(Exception):
    """Training has gone wrong: it is to go on from a checkpoint that is not later than `good_step`."""

    def __init__(self, kind: str, error: GradusError, good_step: int, data: StepData | None) -> None:
        """`error` says what happened, and ends the run if it cannot go back. `data` is to be left out from now on."""
        super().__init__(error.message)
        self.kind, self.error, self.good_step, self.data = kind, error, good_step, data


def check_can_recover(recipe: Recipe, plan: Plan, *, own_loop: bool) -> None:
    """Refuse before training what could not be done when it is needed."""
    for field, found in (("on_nan", recipe.on_nan), ("on_spike", recipe.on_spike)):
        if found == "rollback" and own_loop:
            raise InputError(
                f"{field}: found rollback, but a loop of your own cannot be taken back to an earlier step",
                hint=f"{'on_nan=skip goes on without the step, ' if field == 'on_nan' else ''}{field}="
                f"{'stop ends the run' if field == 'on_nan' else 'warn tells of it'}; a recipe that names model and "
                "data can roll back",
                field=field,
                found=found,
                allowed=["stop", "skip"] if field == "on_nan" else ["ignore", "warn"],
            )
        if found in ("skip", "rollback") and plan.synchronise_every > 1:
            raise InputError(
                f"{field}: found {found}, but with plan.synchronise_every={plan.synchronise_every} ranks step alone "
                "and do not decide together",
                hint=f"leave {field} out, or use plan.synchronise_every=1",
                field=field,
                found=found,
            )


def left_out_by_rollbacks(live: LiveRun) -> list[tuple[int, int]]:
    """Positions that earlier rollbacks of the run leave out, also if no checkpoint knows yet. All ranks must ask."""
    spans: list[tuple[int, int]] = []
    if live.world.leads:
        spans = [one.skipped for one in read_rollbacks(live.run) if one.skipped is not None]
    if live.world.size > 1:
        box = [spans]
        dist.broadcast_object_list(box, src=0)
        spans = box[0]
    return spans


def roll_back(live: LiveRun, back: GoBack) -> None:
    """Go back, or raise the error if the run has done so too often. All ranks must call it, at the same boundary."""
    step, data, left_out = live.state.step, back.data, live.state.skipped_positions
    skipped = (data.positions.start, data.positions.stop) if data is not None else None
    before = _so_far(live)
    if before >= MOST_ROLLBACKS:
        error = _too_often(back.error, before)
        live.recorder.event("fault", **error.document())
        raise error
    live.saving.rescue()  # one that is being written is of a step that was good
    live.world.barrier()
    if live.world.leads:
        steps = live.store.steps()
        to_step = max((saved for saved in steps if saved <= back.good_step), default=None)
        note_rollback(live.run, Rollback(step, to_step, skipped, back.error.message), live.recorder.report)
        aside = set_aside(live.store.folder, later_than=back.good_step)
        for problem in aside.problems:
            live.recorder.problem("checkpoint-note", problem)
        live.distrusted = {saved for saved in live.store.steps() if saved > back.good_step}
    workers = live.loader.workers
    live.saving.close()
    step_back(live)
    if live.plan.compile:
        torch.compiler.reset()  # what it has compiled is of modules that are gone, and counts as recompilation
    live.rolled_back = True
    live.rebuild()
    live.state.rollbacks = before + 1
    live.leave_out([*live.recipe.data.skip, *left_out, *([skipped] if skipped is not None else [])])
    live.loader.workers = workers  # as they were chosen
    live.samples = TrainedSamples(live)
    live.recorder.rolled_back(live.state.step)
    fields = {**(data.fields if data is not None else {}), "kind": back.kind}
    without = f", without positions {data.positions.start} to {data.positions.stop - 1}" if data is not None else ""
    live.recorder.event(
        "rollback",
        step=step,
        from_step=step,
        to_step=live.state.step,
        rollbacks=live.state.rollbacks,
        why=back.error.message,
        message=f"rolls back from step {step} to step {live.state.step}{without} ({live.state.rollbacks} of at most "
        f"{MOST_ROLLBACKS}): {back.error.message}",
        **fields,
    )


def _so_far(live: LiveRun) -> int:
    """How often the run has gone back: as its folder says, and as its state says, should the folder have lost it."""
    number = torch.tensor(live.state.rollbacks)
    if live.world.leads:
        number = torch.tensor(max(live.state.rollbacks, len(read_rollbacks(live.run))))
    if live.world.size > 1:
        dist.broadcast(number, src=0)  # of the host, which gloo sends
    return int(number)


def _too_often(error: GradusError, before: int) -> GradusError:
    told = f"{error.message}. The run has rolled back {before} times already, the most that it may"
    details = {**error.details, "rollbacks": before}
    if isinstance(error, DoNotRestart):
        return DoNotRestart(told, hint=error.hint, **details)
    return type(error)(told, hint=error.hint, **details)
