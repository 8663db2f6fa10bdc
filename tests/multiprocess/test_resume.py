"""What may change when a run goes on, what must not, and what is never lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pool
from training_cases import CLUSTER, recipe_for
from user_runs import HERE, attempt, line_recipe

from gradus.planner.defaults import default_plan
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics
from gradus.training.joining import write_files


def test_more_steps(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, line_recipe(steps=4))
    assert attempt(pool, run, line_recipe(steps=7), 2)[0]["step"] == 7
    assert [row["step"] for row in read_metrics(run)] == list(range(1, 8))


def test_another_optimizer_starts_anew_and_says_so(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, line_recipe(steps=4, optimizer={"use": "sgd", "lr": 0.01, "momentum": 0.9}))
    attempt(pool, run, line_recipe(steps=8, optimizer={"use": "adamw", "lr": 0.01}), 2)
    messages = [event.get("message", "") for event in read_events(run)]
    assert "optimizer adamw starts anew; the run had sgd before" in messages


def test_what_is_set_otherwise_than_before_is_said_where_it_goes_on(pool: Pool, run: RunDirectory) -> None:
    adamw = {"use": "adamw", "lr": 0.01}
    before = line_recipe(steps=4, optimizer={**adamw, "moments": "bf16"})
    now = line_recipe(steps=6, optimizer=adamw, plan={"precision": "bf16"})
    for number, recipe in enumerate((before, now, now), start=1):
        plan = default_plan(recipe, CLUSTER, 1).plan
        run.attempt_path(number).mkdir(parents=True, exist_ok=True)
        write_files(run, number, {"recipe.yaml": recipe.to_yaml(), "plan.yaml": plan.to_yaml()})
        attempt(pool, run, recipe, number)
    told = [event for event in read_events(run) if event["event"] == "resume"]
    assert [event["message"] for event in told] == [
        "goes on from step 4 with steps=6 (was 4), optimizer.moments=fp32 (was bf16), plan.precision=bf16 (was fp32)",
        "goes on from step 6",
    ]
    assert told[0]["changed"]["steps"] == [4, 6]


def test_another_precision(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, recipe_for("gpt", steps=3))
    for number, precision in enumerate(("fp16", "bf16", "fp32"), start=2):
        assert attempt(pool, run, recipe_for("gpt", steps=3 * number, plan={"precision": precision}), number)


def test_without_the_target_that_had_been_reached(pool: Pool, run: RunDirectory) -> None:
    reached = attempt(pool, run, line_recipe(evaluate={"every": 2, "target": 1e6}))
    assert (reached[0]["step"], "reached the target" in reached[0]["reason"]) == (2, True)
    assert attempt(pool, run, line_recipe(evaluate={"every": 2, "target": 1e6}), 2)[0]["step"] == 2
    assert attempt(pool, run, line_recipe(evaluate={"every": 2}), 3)[0]["step"] == 10


def test_a_dataset_of_another_length_is_refused(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, line_recipe(steps=4))
    with pytest.raises(AssertionError, match=r"the run began with 58 training samples, found 86"):
        attempt(pool, run, line_recipe(data={"use": f"{HERE}:Points", "samples": 96}), 2)


def test_a_budget_that_ended_with_a_short_batch_cannot_be_extended(pool: Pool, run: RunDirectory) -> None:
    """58 samples in batches of 8 end with 2; the next batch would have begun with the 59th."""
    attempt(pool, run, line_recipe(steps=None, epochs=1))
    with pytest.raises(AssertionError, match="would skip the samples"):
        attempt(pool, run, line_recipe(steps=None, epochs=2), 2)
    assert attempt(pool, run, line_recipe(steps=None, epochs=1), 3)[0]["state"] == "finished"


def test_a_metric_that_fails_does_not_lose_what_was_trained(pool: Pool, run: RunDirectory) -> None:
    with pytest.raises(AssertionError, match="this metric is broken"):
        attempt(pool, run, line_recipe(metrics=[f"{HERE}:raising_metric"]))
    assert attempt(pool, run, line_recipe(), 2)[0]["step"] == 10
    assert {row["attempt"] for row in read_metrics(run)} == {1}, "nothing was trained again"


def test_a_metric_that_does_not_exist_is_refused_before_training(pool: Pool, run: RunDirectory) -> None:
    with pytest.raises(AssertionError, match=r"evaluate.metric: unknown metric 'acuracy'"):
        attempt(pool, run, line_recipe(metrics=["accuracy"], evaluate={"metric": "acuracy"}))
    assert read_metrics(run) == []


def test_weights_that_are_no_numbers_are_never_saved(pool: Pool, run: RunDirectory) -> None:
    """With few log lines and no clipping nobody looks at the gradients of each step."""
    recipe = line_recipe(
        model={"use": f"{HERE}:Poisoned", "at_call": 6}, steps=20, log_every=10, checkpoint={"every": 2, "keep": 9}
    )
    with pytest.raises(AssertionError, match=r"is nan at step 6; the last good step is 4"):
        attempt(pool, run, recipe)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000002", "step-00000004"]


def test_pauses_are_no_part_of_a_step_also_with_few_log_lines(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, line_recipe(steps=20, log_every=5, evaluate={"every": 2}, checkpoint={"every": 3}))
    for row in read_metrics(run):
        if "step_seconds" in row:
            samples = 8 / row["step_seconds"]
            assert row["samples_per_second"] == pytest.approx(samples, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_looks_at_the_same_samples_whatever_the_plan(pool: Pool, tmp_path: Path, ranks: int) -> None:
    losses = set()
    for accumulate in (1, 2, 4):
        run = RunDirectory.create(tmp_path, "run")
        plan = {"precision": "fp64", "accumulate": accumulate}
        recipe = recipe_for("gpt", batch=24, steps=1, evaluate={"batches": 2}, plan=plan)
        attempt(pool, run, recipe, ranks=ranks)
        losses.add(f"{read_metrics(run)[-1]['validation_loss']:.9g}")
    assert len(losses) == 1, losses


def test_a_budget_below_what_is_done_is_refused(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, line_recipe(steps=6))
    with pytest.raises(AssertionError, match="the run is at step 6 already, beyond its budget of 4 now"):
        attempt(pool, run, line_recipe(steps=4), 2)
