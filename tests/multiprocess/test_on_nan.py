"""A loss, gradient or weight that is no number, on any mesh: the step is skipped, or the run goes back and on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from on_nan_cases import (
    BATCH,
    HERE,
    LOUD,
    NOT_A_NUMBER,
    STEEP,
    followed,
    marked_recipe,
    own_loop_over_holes,
    run_marked,
)
from own_loops import fitted, own_recipe
from pool import Pool
from training_cases import same_weights
from user_runs import line_recipe

from gradus.checkpoint.manifest import committed_steps
from gradus.data.audit import audit, plain_stream
from gradus.data.lineage import read_records
from gradus.faults.numerics import MOST_SKIPPED_IN_A_ROW
from gradus.faults.rollback_log import MOST_ROLLBACKS, Rollback, note_rollback, read_rollbacks
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics

BAD_STEP = 7  # from 1
BAD = {(BAD_STEP - 1) * BATCH + 3: NOT_A_NUMBER}
SPAN = [(BAD_STEP - 1) * BATCH, BAD_STEP * BATCH]
SAVED = 4  # the last checkpoint before it
MESHES = {
    "replicate, accumulating": {"mesh": {"replicate": 2}, "accumulate": 2},
    "shard": {"mesh": {"shard": 2}},
    "tensor": {"mesh": {"tensor": 2}},
    "pipeline": {"mesh": {"pipeline": 2}, "accumulate": 2, "micro_batch": 4},
    "context": {"mesh": {"context": 2}},
    "shard and replicate": {"mesh": {"shard": 2, "replicate": 2}},
}
FIRST = "replicate, accumulating"
EVERY_MESH = [name if name == FIRST else pytest.param(name, marks=pytest.mark.slow) for name in MESHES]


def ranks_of(plan: dict[str, Any]) -> int:
    ranks = 1
    for ways in plan["mesh"].values():
        ranks *= ways
    return ranks


def curve(run: RunDirectory) -> dict[int, float | None]:
    return {row["step"]: row["loss"] for row in read_metrics(run)}


def events_of(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == kind]


@pytest.fixture
def other(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "other")


@pytest.mark.parametrize("mesh", EVERY_MESH)
def test_after_a_rollback_it_is_bit_for_bit_a_run_resumed_there_without_those_samples(
    pool: Pool, run: RunDirectory, other: RunDirectory, mesh: str
) -> None:
    plan = MESHES[mesh]
    ranks = ranks_of(plan)
    went_back = run_marked(pool, ranks, run, marked_recipe(BAD, on_nan="rollback", plan=plan))
    run_marked(pool, ranks, other, marked_recipe(BAD, steps=SAVED, plan=plan))
    data = {**marked_recipe(BAD).data.model_dump(exclude_unset=True), "skip": [SPAN]}
    resumed = run_marked(pool, ranks, other, marked_recipe(BAD, data=data, plan=plan), attempt=2)
    assert curve(run) == curve(other)
    assert len(curve(run)) == 10
    ours, theirs = went_back[0]["weights"], resumed[0]["weights"]
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    [event] = events_of(run, "rollback")
    assert (event["from_step"], event["to_step"]) == (BAD_STEP + 1, SAVED)
    assert event["positions"] == [SPAN[0], SPAN[1] - 1]
    assert event["sample_indices"] == list(range(*SPAN))
    newest = max(committed_steps(run.checkpoints))
    found = audit(read_records(run), newest, lambda attempt, described: plain_stream(described))
    assert not found.findings, "the sample logs say that all but those were trained on once"


@pytest.mark.parametrize(
    "mark", [pytest.param(NOT_A_NUMBER, id="loss"), pytest.param(STEEP, id="gradient", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("mesh", EVERY_MESH)
def test_a_skipped_step_is_as_if_its_samples_had_never_been_there(
    pool: Pool, run: RunDirectory, other: RunDirectory, mesh: str, mark: int
) -> None:
    """Also for the optimizer, whose moments a NaN would spoil for good. The learning rate is constant by then."""
    plan = MESHES[mesh]
    marks = dict.fromkeys(BAD, mark)
    skipped = run_marked(pool, ranks_of(plan), run, marked_recipe(marks, on_nan="skip", plan=plan))
    data = {**marked_recipe(marks).data.model_dump(exclude_unset=True), "skip": [SPAN]}
    never = run_marked(pool, ranks_of(plan), other, marked_recipe(marks, data=data, steps=9, plan=plan))
    after = {step - 1: loss for step, loss in curve(run).items() if step > BAD_STEP}
    assert after == {step: loss for step, loss in curve(other).items() if step >= BAD_STEP}
    assert curve(run)[BAD_STEP] is None
    theirs = never[0]["weights"]
    assert all(torch.equal(weight, theirs[name]) for name, weight in skipped[0]["weights"].items())
    [event] = events_of(run, "skipped-step")
    assert (event["step"], event["sample_indices"]) == (BAD_STEP, list(range(*SPAN)))
    assert "the loss is nan" in event["message"] if mark == NOT_A_NUMBER else "the gradient norm is" in event["message"]


@pytest.mark.slow
def test_where_all_are_numbers_watching_changes_none_of_them(pool: Pool, tmp_path: Path) -> None:
    curves = []
    for on_nan in ("stop", "skip", "rollback"):
        run = RunDirectory.create(tmp_path, on_nan)
        run_marked(pool, 2, run, marked_recipe({}, on_nan=on_nan, log_every=1))
        curves.append(curve(run))
    assert curves[0] == curves[1] == curves[2]


def test_without_a_checkpoint_it_begins_again(pool: Pool, run: RunDirectory, other: RunDirectory) -> None:
    marks = {BATCH + 1: NOT_A_NUMBER}
    run_marked(pool, 1, run, marked_recipe(marks, on_nan="rollback", steps=5))
    data = {**marked_recipe(marks).data.model_dump(exclude_unset=True), "skip": [[BATCH, 2 * BATCH]]}
    run_marked(pool, 1, other, marked_recipe(marks, data=data, steps=5))
    assert curve(run) == curve(other)
    assert events_of(run, "rollback")[0]["to_step"] == 0


def test_it_goes_back_three_times_and_not_a_fourth(pool: Pool, run: RunDirectory) -> None:
    """Each bad batch is behind the one before, so that the next is found after a rollback for the last."""
    bad = [BATCH * step for step in (2, 4, 6, 8)]
    with pytest.raises(AssertionError, match=r"DoNotRestart: the loss is nan at step 6.*rolled back 3 times already"):
        run_marked(pool, 1, run, marked_recipe(dict.fromkeys(bad, NOT_A_NUMBER), on_nan="rollback"))
    assert len(read_rollbacks(run)) == MOST_ROLLBACKS == len(events_of(run, "rollback"))
    assert max(int(path.name.removeprefix("step-")) for path in run.checkpoints.iterdir()) == 4
    assert events_of(run, "fault")[-1]["rollbacks"] == 3


def test_what_a_rollback_left_out_stays_left_out_when_the_run_is_killed_before_its_next_checkpoint(
    pool: Pool, run: RunDirectory
) -> None:
    run_marked(pool, 2, run, marked_recipe(BAD, steps=SAVED))
    note_rollback(run, Rollback(8, SAVED, (SPAN[0], SPAN[1]), "the loss is nan"), print)
    [result, _] = run_marked(pool, 2, run, marked_recipe(BAD, on_nan="stop"), attempt=2)
    assert (result["state"], result["skipped"]) == ("finished", ((SPAN[0], SPAN[1]),))


def test_those_before_a_restart_count_too(pool: Pool, run: RunDirectory) -> None:
    run_marked(pool, 1, run, marked_recipe(BAD, steps=SAVED))
    for _ in range(MOST_ROLLBACKS):
        note_rollback(run, Rollback(8, SAVED, (300, 301), "the loss is nan"), print)
    with pytest.raises(AssertionError, match="rolled back 3 times already"):
        run_marked(pool, 1, run, marked_recipe(BAD, on_nan="rollback"), attempt=2)


def test_too_many_skips_in_a_row_end_the_run(pool: Pool, run: RunDirectory) -> None:
    marks = dict.fromkeys(range(3 * BATCH, 400), NOT_A_NUMBER)
    last = 4 + MOST_SKIPPED_IN_A_ROW
    with pytest.raises(AssertionError, match=f"DoNotRestart: .*no number in 6 steps in a row, 4 to {last}"):
        run_marked(pool, 1, run, marked_recipe(marks, on_nan="skip"))


def test_a_skipped_step_leaves_the_averages_of_batch_normalisation_alone(
    pool: Pool, run: RunDirectory, other: RunDirectory
) -> None:
    """The forward pass of a bad batch has put NaN into them before anybody knows."""
    data = {"use": f"{HERE}:holey", "holes": [20], "shuffle": "none"}
    recipe = line_recipe(model={"use": f"{HERE}:WithBatchNorm"}, data=data, on_nan="skip", steps=6)
    ours = pool.run(2, followed, str(run.path), recipe)
    recipe = line_recipe(model={"use": f"{HERE}:WithBatchNorm"}, data={**data, "skip": [[16, 24]]}, steps=5)
    theirs = pool.run(2, followed, str(other.path), recipe)
    weights = same_weights(theirs)
    assert all(torch.equal(weight, weights[name]) for name, weight in same_weights(ours).items())


@pytest.mark.slow
def test_with_fp16_too(pool: Pool, run: RunDirectory) -> None:
    [result] = run_marked(pool, 1, run, marked_recipe(BAD, on_nan="skip", plan={"precision": "fp16"}))
    assert BAD_STEP - 1 in result["skipped_steps"]
    bad = [event for event in events_of(run, "skipped-step") if event.get("kind") == "not-a-number"]
    assert [event["step"] for event in bad] == [BAD_STEP]
    assert all(bool(torch.isfinite(weight).all()) for weight in result["weights"].values())


def test_a_spike_that_stays_makes_it_go_back_too(pool: Pool, run: RunDirectory) -> None:
    marks = {step * BATCH: LOUD for step in (20, 21)}
    spike = {"window": 16, "steps": 2}
    recipe = marked_recipe(marks, on_spike="rollback", spike=spike, steps=24)
    [result] = run_marked(pool, 1, run, recipe)
    assert (result["step"], result["rollbacks"]) == (24, 1)
    first = events_of(run, "rollback")[0]
    assert (first["kind"], first["to_step"], first["positions"]) == ("loss-spike", 20, [160, 175])
    assert max(loss for loss in curve(run).values() if loss is not None) < 10


def test_a_spike_is_told_with_its_samples_and_nothing_else_happens(pool: Pool, run: RunDirectory) -> None:
    marks = {step * BATCH: LOUD for step in (20, 21)}
    [result] = run_marked(pool, 1, run, marked_recipe(marks, spike={"window": 16, "steps": 2}, steps=24))
    assert (result["step"], result["rollbacks"]) == (24, 0)
    [event] = events_of(run, "fault")
    assert (event["kind"], event["step"], event["sample_indices"]) == ("loss-spike", 22, list(range(160, 176)))
    assert event["factor"] > 6


@pytest.mark.parametrize("field", ["on_nan", "on_spike"])
def test_a_loop_of_the_users_own_cannot_be_rewound_and_says_so(pool: Pool, run: RunDirectory, field: str) -> None:
    with pytest.raises(AssertionError, match=rf"{field}: found rollback, but a loop of your own cannot"):
        pool.run(1, fitted, str(run.path), own_recipe(**{field: "rollback"}))


def test_a_loop_of_the_users_own_skips_too(pool: Pool, run: RunDirectory, other: RunDirectory) -> None:
    data = {"shuffle": "none"}
    ours = pool.run(2, own_loop_over_holes, str(run.path), own_recipe(on_nan="skip", steps=6, data=data), [19])
    skip = {**data, "skip": [[16, 24]]}
    theirs = pool.run(2, own_loop_over_holes, str(other.path), own_recipe(steps=5, data=skip), [19])
    weights = same_weights(theirs)
    assert all(torch.equal(weight, weights[name]) for name, weight in same_weights(ours).items())
    assert events_of(run, "skipped-step")[0]["positions"] == [16, 23]


@pytest.mark.parametrize("on_nan", ["skip", "rollback"])
def test_ranks_that_step_alone_do_not_decide_together(pool: Pool, run: RunDirectory, on_nan: str) -> None:
    with pytest.raises(AssertionError, match=r"on_nan: found .*, but with plan.synchronise_every=2 ranks step alone"):
        run_marked(pool, 2, run, marked_recipe({}, on_nan=on_nan, plan={"synchronise_every": 2}))
