"""What goes back with a run and what does not; and that the guard decides without the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from gradus.faults.rollback_log import Rollback, note_rollback, read_rollbacks
from gradus.parallel.world import alone
from gradus.record.directory import RunDirectory
from gradus.record.metrics import merge_by_step
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.guard import Guard
from gradus.training.training_state import TrainingState

CPU = torch.device("cpu")


def row(step: int, loss: float, attempt: int = 1) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "loss": loss}


def test_rows_of_steps_that_were_given_up_are_no_part_of_the_run() -> None:
    before = [row(1, 3.0), row(2, 2.0), {**row(2, 0.0), "validation_loss": 9.0}, row(3, 9.0)]
    del before[2]["loss"]
    back = {"rolled_back_to": 1, "attempt": 1}
    assert merge_by_step([*before, back]) == [row(1, 3.0)]
    assert merge_by_step([*before, back, row(2, 1.5)]) == [row(1, 3.0), row(2, 1.5)]


def test_a_rollback_within_an_attempt_leaves_earlier_attempts_alone() -> None:
    records = [row(1, 3.0), row(2, 2.0), row(3, 1.0, 2), {"rolled_back_to": 2, "attempt": 2}]
    assert merge_by_step(records) == [row(1, 3.0), row(2, 2.0)]


def test_the_log_of_rollbacks_is_read_as_it_was_written(run: RunDirectory) -> None:
    assert read_rollbacks(run) == []
    noted = [Rollback(8, 4, (48, 56), "the loss is nan"), Rollback(9, None, None, "silent corruption")]
    for one in noted:
        note_rollback(run, one, pytest.fail)
    assert read_rollbacks(run) == noted


def test_a_state_that_knew_nothing_of_this_is_still_read() -> None:
    document = TrainingState(step=7, skipped_positions=((3, 5),)).document()
    for key in ("spikes", "rollbacks", "not_finite_steps"):
        del document[key]
    state = TrainingState.from_document(document)
    assert (state.step, state.rollbacks, state.spikes.recent) == (7, 0, [])
    state.spikes.recent.append(2.5)
    assert TrainingState.from_document(state.document()) == state


@pytest.mark.parametrize(
    ("loss_sum", "count", "norm", "bad"),
    [
        (2.0, 4.0, 1.0, 0.0),
        (math.nan, 4.0, 1.0, 1.0),
        (math.inf, 4.0, 1.0, 1.0),
        (2.0, 4.0, math.inf, 1.0),
        (0.0, 0.0, 0.0, 1.0),  # no valid token at all: its mean is no number
        (2.0, 4.0, None, 0.0),
    ],
)
def test_what_is_no_number(loss_sum: float, count: float, norm: float | None, bad: float) -> None:
    guard = Guard(nn.Linear(1, 1), alone(CPU), skips=True)
    given = None if norm is None else torch.tensor(norm)
    assert float(guard.not_finite(torch.tensor(loss_sum), torch.tensor(count), given)) == bad


@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_buffers_are_put_back_after_a_bad_step_only(bad: float) -> None:
    norm = nn.BatchNorm1d(2)
    guard = Guard(norm, alone(CPU), skips=True)
    guard.begin()
    norm(torch.full((3, 2), math.nan) if bad else torch.randn(3, 2))
    guard.undo(torch.tensor(bad))
    assert int(norm.num_batches_tracked or 0) == (0 if bad else 1)
    assert bool(torch.isfinite(norm.running_mean).all())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", ["on_nan=restart", "on_spike=skip", "spike.factor=0", "spike.window=3", "checksums.every=0", "spike.odd=1"]
)
def test_settings_that_mean_nothing_are_refused(given: str) -> None:
    with pytest.raises(InputError, match=given.partition("=")[0]):
        Recipe.from_document({"name": "r", "batch": 1, "steps": 1}, overrides=[given])


def test_by_default_it_stops_warns_and_compares() -> None:
    recipe = Recipe.from_document({"name": "r", "batch": 1, "steps": 1}, overrides=["checksums.every=null"])
    assert (recipe.on_nan, recipe.on_spike, recipe.checksums.every) == ("stop", "warn", None)
    assert "on_nan" not in recipe.to_yaml()
