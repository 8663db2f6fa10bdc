"""A loop of the user's own: the same losses as the recipe's loop, and everything around a step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import (
    evaluated_with_output,
    fitted,
    head_only,
    kept_module,
    mean_over_parts,
    misused,
    own_recipe,
    scheduled,
    weighted,
)
from pool import Pool
from training_cases import trained
from user_runs import HERE, line_recipe

from gradus.checkpoint.store import CheckpointStore
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics
from gradus.record.outcome import read_outcome

DOUBLE = {"precision": "fp64", "checkpoint_every": 1000}


def losses(run: RunDirectory) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_has_the_loss_curve_of_a_recipe(pool: Pool, tmp_path: Path, ranks: int, accumulate: int) -> None:
    ours, theirs = RunDirectory.create(tmp_path, "ours"), RunDirectory.create(tmp_path, "theirs")
    pool.run(ranks, fitted, str(theirs.path), own_recipe(plan={**DOUBLE, "accumulate": accumulate}))
    recipe = line_recipe(
        data={"use": f"{HERE}:all_points_to_train"},
        optimizer={"use": "sgd", "lr": 0.01, "momentum": 0.9, "decay_norms_and_biases": True},
        plan=DOUBLE,
        seed=7,
    )
    pool.run(1, trained, str(ours.path), recipe)
    assert losses(theirs) == pytest.approx(losses(ours), rel=1e-9)
    assert losses(theirs)[-1] < losses(theirs)[0]


def test_each_micro_batch_is_handed_out_and_steps_are_counted(pool: Pool, run: RunDirectory) -> None:
    [result] = pool.run(1, fitted, str(run.path), own_recipe(plan={"accumulate": 4}))
    assert (result["batches"], result["steps"]) == (40, 10)


def test_a_short_last_batch_weighs_as_many_samples_as_it_has(pool: Pool, tmp_path: Path) -> None:
    curves = []
    for ranks in (1, 4):  # 64 samples and batches of 24: in the third, some ranks have nothing but padding
        run = RunDirectory.create(tmp_path, f"on-{ranks}")
        recipe = own_recipe(steps=None, epochs=1, batch=24, plan=DOUBLE)
        results = pool.run(ranks, fitted, str(run.path), recipe)
        assert {result["steps"] for result in results} == {3}
        curves.append(losses(run))
    assert curves[1] == pytest.approx(curves[0], rel=1e-9)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_stopped_loop_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, ranks: int) -> None:
    recipe = own_recipe(batch=6, steps=20, deterministic=True, optimizer={"use": "own", "clip": 0.1})
    whole, cut = RunDirectory.create(tmp_path, "whole"), RunDirectory.create(tmp_path, "cut")
    expected = pool.run(ranks, fitted, str(whole.path), recipe, 1, None, None, 400)
    first = pool.run(ranks, fitted, str(cut.path), recipe, 1, 5, None, 400)
    assert all(result["stopped"] and 5 <= result["steps"] < 20 for result in first)
    assert (read_outcome(cut, 1) or {})["exit_code"] == 75
    cut.stop_file.unlink()
    second = pool.run(ranks, fitted, str(cut.path), recipe, 2, None, None, 400)
    assert not second[0]["stopped"]
    assert second[0]["batches"] == 20 - first[0]["steps"]
    for result in second:
        for name, weight in expected[0]["weights"].items():
            assert torch.equal(result["weights"][name], weight), name
    assert losses(cut) == losses(whole)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("compiled", [(False, True), (True, False)])
def test_a_loop_goes_on_with_and_without_a_compiler(
    pool: Pool, tmp_path: Path, zero: int, compiled: tuple[bool, bool]
) -> None:
    recipe = own_recipe(deterministic=True, plan={"zero": zero, "precision": "fp32"})
    whole, cut = RunDirectory.create(tmp_path, "whole"), RunDirectory.create(tmp_path, "cut")
    pool.run(2, fitted, str(whole.path), recipe, 1, None, None, 16)
    pool.run(2, fitted, str(cut.path), recipe, 1, None, 4, 16, compiled[0])
    pool.run(2, fitted, str(cut.path), recipe, 2, None, None, 16, compiled[1])
    assert len(losses(cut)) == 10
    assert losses(cut) == losses(whole)


def test_evaluations_are_recorded_and_can_end_the_loop(pool: Pool, tmp_path: Path) -> None:
    results = []
    for ranks in (1, 2):
        run = RunDirectory.create(tmp_path, f"on-{ranks}")
        recipe = own_recipe(steps=30, plan=DOUBLE, evaluate={"every": 4, "target": 1.0})
        [result, *_] = pool.run(ranks, fitted, str(run.path), recipe)
        results.append([evaluation["loss"] for evaluation in result["evaluations"]])
        assert result["steps"] < 30
        assert results[-1][-1] <= 1.0 < results[-1][-2]
        rows = [row for row in read_metrics(run) if "validation_loss" in row]
        assert [row["step"] for row in rows] == [4 * (n + 1) for n in range(len(results[-1]))]
        assert [row["evaluations"] for row in rows] == [n + 1 for n in range(len(rows))]
        assert all("loss" in row and "lr" in row for row in rows), "own numbers join the row of the step"
        assert "reached the target" in (read_outcome(run, 1) or {})["reason"]
    assert results[1] == pytest.approx(results[0], rel=1e-9)


def test_a_loop_that_is_left_with_break_is_finished_and_saved(pool: Pool, run: RunDirectory) -> None:
    results = pool.run(2, fitted, str(run.path), own_recipe(), 1, None, 6)
    assert [result["steps"] for result in results] == [6, 6]
    assert CheckpointStore(run.checkpoints).steps() == [6]
    outcome = read_outcome(run, 1) or {}
    assert outcome["state"] == "finished"
    assert "left after 6 steps" in outcome["reason"]


def test_the_optimizers_own_rate_stays_unless_the_recipe_schedules_it(pool: Pool, tmp_path: Path) -> None:
    def rate(**changes: Any) -> float:
        run = RunDirectory.create(tmp_path, "rate")
        [result] = pool.run(1, fitted, str(run.path), own_recipe(**changes))
        assert read_metrics(run)[-1]["lr"] == pytest.approx(result["rates"][0])
        return float(result["rates"][0])

    assert rate() == 0.01
    halves = {"decay": "step", "decay_every": 5, "decay_factor": 0.5}
    assert rate(optimizer={"use": "own", **halves}) == pytest.approx(0.005)
    assert rate(optimizer={"use": "sgd", "lr": 0.03}) == pytest.approx(0.03), "a rate in the recipe wins"


def test_hooks_and_the_start_event_belong_to_own_loops_too(pool: Pool, run: RunDirectory) -> None:
    recipe = own_recipe(hooks=[{"use": "ema", "decay": 0.5}], checkpoint={"every": 5})
    pool.run(1, fitted, str(run.path), recipe)
    [start] = [event for event in read_events(run) if event["event"] == "start"]
    assert (start["steps_total"], start["ranks"]) == (10, 1)
    newest = CheckpointStore(run.checkpoints).newest()[0]
    assert newest is not None
    assert "hooks.ema.weight" in newest.tensors()


@pytest.mark.parametrize("kind", ["step", "exponential", "lambda", "one-cycle", "sequence"])
def test_a_scheduler_goes_on_where_it_was(pool: Pool, tmp_path: Path, kind: str) -> None:
    whole, cut = RunDirectory.create(tmp_path, "whole"), RunDirectory.create(tmp_path, "cut")
    [expected] = pool.run(1, scheduled, str(whole.path), 1, 12, kind)
    assert len(set(expected)) > 3
    pool.run(1, scheduled, str(cut.path), 1, 5, kind)
    [found] = pool.run(1, scheduled, str(cut.path), 2, 12, kind)
    assert found == pytest.approx(expected, rel=1e-12)


def test_gradients_do_not_pile_up_where_the_optimizer_does_not_reach(pool: Pool, run: RunDirectory) -> None:
    [norms] = pool.run(1, head_only, str(run.path))
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_may_add_up_to_less_than_one(pool: Pool, tmp_path: Path, accumulate: int) -> None:
    heavy, light = (
        pool.run(2, weighted, str(RunDirectory.create(tmp_path, "weighted").path), weight, accumulate)[0]
        for weight in (1.0, 2.0**-10)  # which fp32 holds exactly
    )
    assert torch.allclose(light, heavy, rtol=1e-9)


def test_an_evaluation_takes_what_a_step_takes(pool: Pool, run: RunDirectory) -> None:
    [results] = pool.run(1, evaluated_with_output, str(run.path))
    assert results.keys() == {"loss"}


@pytest.mark.parametrize(("key", "value"), [("seed", 9), ("batch", 4)])
def test_a_loop_does_not_go_on_with_other_samples(pool: Pool, run: RunDirectory, key: str, value: int) -> None:
    pool.run(1, fitted, str(run.path), own_recipe())
    with pytest.raises(AssertionError, match=f"{key}: the run began with"):
        pool.run(1, fitted, str(run.path), own_recipe(steps=20, **{key: value}), 2)


@pytest.mark.parametrize(
    ("how", "message", "hint"),
    [
        ("batches before prepare", "call run.prepare", None),
        ("no optimizer", "there is no optimizer", "run.prepare(model, torch.optim"),
        ("prepare twice", "it was called before", None),
        ("optimizer of another model", "2 parameters of the optimizer are not the model's", "very model"),
        ("step without a batch", "no batch whose loss this could be", "once in the body"),
        ("no step", "run.step(loss) was not called for a batch of step 1", "once for each batch"),
        ("step twice", "no batch whose loss this could be", "once in the body"),
        ("evaluate before step", "call run.step(loss) for the present batch first", None),
        ("no length", "does not give a sample by its number", None),
        ("vector", "a tensor of shape (8,)", ".mean()"),
        ("detached", "no gradient can flow", ".detach()"),
        ("number", "a Python float", None),
        ("own backward", "backward has already gone through the graph", "leave out loss.backward(), optimizer.step()"),
        ("optimizer first", "found SGD as the model", "run.prepare(model, optimizer, scheduler), in this order"),
        ("scheduler second", "found StepLR as the optimizer", "in this order"),
        ("data third", "found DataLoader as the scheduler", "data goes to run.batches(dataset)"),
        ("loader", "run.batches: DataLoader does not give a sample by its number", "loader.dataset"),
        ("loader for an evaluation", "run.evaluate: DataLoader does not give", "loader.dataset"),
    ],
)
def test_a_mistake_in_the_loop_is_explained(
    pool: Pool, run: RunDirectory, how: str, message: str, hint: str | None
) -> None:
    [(found, found_hint)] = pool.run(1, misused, str(run.path), how)
    assert message in found
    assert hint is None or hint in (found_hint or "")


def test_a_module_that_was_kept_and_the_whole_state_dict_are_there_on_any_ranks(pool: Pool, tmp_path: Path) -> None:
    def found(ranks: int, **plan: Any) -> tuple[str, dict[str, Any]]:
        run = RunDirectory.create(tmp_path, "kept")
        results: list[tuple[str, dict[str, Any]]] = pool.run(ranks, kept_module, str(run.path), plan)
        return results[0]

    note, alone = found(1)
    for note, whole in (found(2), found(2, zero=3)):
        assert note == "mine"
        torch.testing.assert_close(whole, alone)


@pytest.mark.parametrize("where", ["step", "evaluate"])
def test_a_mean_over_a_part_of_the_sequences_is_refused_on_every_rank(
    pool: Pool, run: RunDirectory, where: str
) -> None:
    for said in pool.run(2, mean_over_parts, str(run.path), where):
        assert said.startswith(f"run.{where}")
        assert "found a mean over a rank's part of the sequences (plan.mesh.context 2)" in said


def test_an_evaluation_that_is_cut_short_gives_no_numbers() -> None:
    from gradus.training.own_evaluation import Results

    assert math.isnan(Results()["loss"])
    with pytest.raises(KeyError):
        Results({"loss": 1.0})["accuracy"]
