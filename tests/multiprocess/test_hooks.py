"""Hooks: called at their moments, on the ranks they say, with what they keep in checkpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import user_hooks
from pool import Pool
from user_runs import HERE, attempt, line_recipe

from gradus.checkpoint.store import CheckpointStore
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe

HOOKS = user_hooks.__file__


def diary(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "diary.jsonl").read_text().splitlines()]


def hooked(*hooks: Any, **changes: Any) -> Recipe:
    return line_recipe(hooks=list(hooks), steps=4, **changes)


@pytest.mark.parametrize(("hook", "on"), [("Diary", [0]), ("DiaryOfAll", [0, 1])])
def test_every_moment_is_called_on_the_ranks_that_the_hook_says(
    pool: Pool, run: RunDirectory, hook: str, on: list[int]
) -> None:
    attempt(pool, run, hooked(f"{HOOKS}:{hook}", evaluate={"every": 2}, checkpoint={"every": 2}), ranks=2)
    entries = diary(run)
    assert {entry["rank"] for entry in entries} == set(on)
    for rank in on:
        mine = [entry for entry in entries if entry["rank"] == rank]
        assert [(entry["moment"], entry["step"]) for entry in mine if entry.get("name") != "step-00000002"] == [
            ("start", 0),
            ("step", 1),
            ("step", 2),
            ("evaluate", 2),
            ("step", 3),
            ("step", 4),
            ("checkpoint", 4),  # before the last evaluation: it may fail
            ("evaluate", 4),
            ("end", 4),
        ]
        # While training goes on it is written, so the hook hears of it when it is there.
        assert [entry["name"] for entry in mine if entry["moment"] == "checkpoint"] == [
            "step-00000002",
            "step-00000004",
        ]
        assert all(entry["of"] == 4 and entry["ranks"] == 2 for entry in mine)
    assert entries[-1]["state"] == "finished"
    assert all(entry["committed"] for entry in entries if entry["moment"] == "checkpoint")
    heard = {(entry["name"], entry["step"]) for entry in entries if entry["moment"] == "checkpoint"}
    assert len(heard) == 2, "all ranks at the same boundary"


@pytest.mark.parametrize("background", [True, False])
def test_a_hook_hears_of_each_checkpoint_once(pool: Pool, run: RunDirectory, background: bool) -> None:
    attempt(pool, run, hooked(f"{HOOKS}:Diary", checkpoint={"every": 1, "background": background}), ranks=1)
    heard = [entry["name"] for entry in diary(run) if entry["moment"] == "checkpoint"]
    assert heard == [f"step-{step:08d}" for step in (1, 2, 3, 4)]


def test_a_hook_sees_the_loss_of_the_step_before(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, hooked(f"{HOOKS}:Diary"))
    seen = [entry["loss"] for entry in diary(run) if entry["moment"] == "step"]
    rows = read_metrics(run)
    assert seen == [None, *(row["loss"] for row in rows[:3])]
    assert [row["twice"] for row in rows] == [2.0, 4.0, 6.0, 8.0], "own numbers stand in the row of their step"


def test_a_hook_is_given_its_keys(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, hooked({"use": f"{HOOKS}:Diary", "file": "other.jsonl"}))
    assert (run.path / "other.jsonl").exists()


def test_what_a_hook_keeps_comes_back_with_the_checkpoint(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, hooked(f"{HOOKS}:Counting"))
    attempt(pool, run, line_recipe(hooks=[f"{HOOKS}:Counting"], steps=6), number=2)
    assert [row["counted"] for row in read_metrics(run)] == [1, 2, 3, 4, 5, 6]


def test_numbers_are_kept_too(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, hooked(f"{HOOKS}:KeepsNumbers"))
    attempt(pool, run, line_recipe(hooks=[f"{HOOKS}:KeepsNumbers"], steps=6), number=2)
    assert [row["calls"] for row in read_metrics(run)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (f"{HOOKS}:Broken", r"hooks: .*Broken, in on_step, raised ValueError: what a pity"),
        (f"{HOOKS}:NotAHook", r"returned NotAHook, allowed: an object of a class derived from gradus\.Hook"),
        ({"use": f"{HOOKS}:Diary", "fiel": "x"}, r"unexpected keyword argument 'fiel'|unknown key"),
        (f"{HOOKS}:KeepsText", r"KeepsText: its state 'text' is a str, which a checkpoint cannot hold"),
        (f"{HOOKS}:WaitsForEpochs", r"unknown moment of .*WaitsForEpochs: 'on_epoch'"),
        ({"use": "ema", "decy": 0.5}, r"hooks: unknown key of the hook ema: 'decy'; did you mean 'decay'"),
        ({"use": "ema", "decay": 1.5}, r"ema has decay 1\.5, allowed: a number from 0 to less than 1"),
    ],
)
def test_a_wrong_hook_is_explained(pool: Pool, run: RunDirectory, hook: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        attempt(pool, run, hooked(hook))


def test_a_hook_of_one_rank_cannot_evaluate(pool: Pool, run: RunDirectory) -> None:
    with pytest.raises(AssertionError, match="this hook is called on rank 0 only"):
        attempt(pool, run, hooked(f"{HOOKS}:MeasuresAlone", evaluate={"every": 2}), ranks=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_moving_average_is_that_of_the_weights(pool: Pool, run: RunDirectory, ranks: int) -> None:
    recipe = line_recipe(
        hooks=[{"use": "ema", "decay": 0.75}], steps=5, checkpoint={"every": 1, "keep": 9}, plan={"precision": "fp64"}
    )
    attempt(pool, run, recipe, ranks=ranks)
    store = CheckpointStore(run.checkpoints)
    expected = None
    for step in store.steps():
        tensors = store.open(step).tensors()
        if expected is not None:
            expected = 0.75 * expected + 0.25 * tensors["model.weight"]
            assert torch.allclose(tensors["hooks.ema.weight"], expected, rtol=1e-12)
        expected = tensors["hooks.ema.weight"]
    assert len(store.steps()) == 5
    assert not torch.equal(tensors["hooks.ema.weight"], tensors["model.weight"])


def test_the_moving_average_is_evaluated_beside_the_weights(pool: Pool, run: RunDirectory) -> None:
    recipe = line_recipe(hooks=[{"use": "ema", "decay": 0.9}], steps=6, evaluate={"every": 3})
    attempt(pool, run, recipe, ranks=2)
    rows = [row for row in read_metrics(run) if "validation_loss" in row]
    assert [row["step"] for row in rows] == [3, 6]
    # The loss falls and the average lags behind: its loss is the larger one, and training went on undisturbed.
    assert all(row["validation_ema_loss"] > row["validation_loss"] for row in rows)
    other = RunDirectory.create(run.path, "without")
    attempt(pool, other, line_recipe(steps=6, evaluate={"every": 3}), ranks=2)
    assert [row["loss"] for row in read_metrics(other)] == [row["loss"] for row in read_metrics(run)]


def test_the_moving_average_goes_on_after_a_resume(pool: Pool, run: RunDirectory) -> None:
    whole = RunDirectory.create(run.path, "whole")
    hooks = [{"use": "ema", "decay": 0.9}]
    attempt(pool, whole, line_recipe(hooks=hooks, steps=6))
    attempt(pool, run, line_recipe(hooks=hooks, steps=3))
    attempt(pool, run, line_recipe(hooks=hooks, steps=6), number=2)
    averages = [CheckpointStore(r.checkpoints).open(6).tensors()["hooks.ema.weight"] for r in (whole, run)]
    assert torch.equal(*averages)


def test_a_dataclass_may_be_a_hook(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, hooked(f"{HOOKS}:Written"))
    assert (run.path / "written.txt").read_text() == "finished"


def test_ranks_agree_that_a_checkpoint_could_not_be_written(pool: Pool, run: RunDirectory) -> None:
    recipe = hooked(f"{HOOKS}:TalksAtCheckpoints", checkpoint={"every": 2, "background": False})
    results = pool.run(2, user_hooks.trained_with_a_full_disk_at, str(run.path), recipe, 2)
    assert [result["state"] for result in results] == ["finished", "finished"]
    assert CheckpointStore(run.checkpoints).steps() == [4]


def test_two_hooks_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="hooks: found two that are called 'ema'"):
        hooked("ema", {"use": "ema", "decay": 0.5})


def test_unknown_hooks_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="hooks: unknown hook 'emma'; did you mean 'ema'"):
        line_recipe(model={"use": f"{HERE}:line"}, hooks=["emma"])
