"""A bit of one rank's memory flips: it is found, named, never saved, and undone where the run may go back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from on_nan_cases import flipped, followed, marked_recipe
from pool import Pool

from gradus.checkpoint.manifest import committed_steps
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics
from gradus.record.node import node_name

TENSOR = "blocks.1.attention.out.weight"
FLIP_STEP = 5  # done steps; checkpoints are of 4 and 8


def faults(run: RunDirectory) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == "fault"]


@pytest.mark.parametrize("what", ["parameter", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_the_odd_one_of_three_is_named_with_its_node_and_the_tensor(pool: Pool, run: RunDirectory, what: str) -> None:
    recipe = marked_recipe({}, checksums={"every": 2}, batch=6)
    results = pool.run(3, flipped, str(run.path), recipe, 1, FLIP_STEP, what)
    [error] = {str(result["error"]): result["error"] for result in results}.values()
    assert (results[0]["exit_code"], error["kind"]) == (1, "silent-corruption")
    assert (error["rank"], error["node"], error["step"], error["last_agreed_step"]) == (1, node_name(), 6, 4)
    assert error["tensor"] == (TENSOR if what == "parameter" else f"{TENSOR} (optimizer: exp_avg_sq)")
    [event] = faults(run)
    assert (event["kind"], event["rank"]) == ("silent-corruption", 1)


def test_what_differs_is_never_saved(pool: Pool, run: RunDirectory) -> None:
    """Also between two comparisons: before each save there is one more."""
    recipe = marked_recipe({}, checksums={"every": 500})
    [result, _] = pool.run(2, flipped, str(run.path), recipe, 1, FLIP_STEP, "parameter")
    assert result["error"]["step"] == 8
    assert "node" not in result["error"]  # of two, nobody knows which
    assert list(committed_steps(run.checkpoints)) == [4]


def test_a_run_that_may_go_back_goes_on_as_if_nothing_had_happened(pool: Pool, tmp_path: Path) -> None:
    run, undisturbed = RunDirectory.create(tmp_path, "run"), RunDirectory.create(tmp_path, "undisturbed")
    recipe = marked_recipe({}, on_nan="rollback", checksums={"every": 2})
    [result, _] = pool.run(2, flipped, str(run.path), recipe, 0, FLIP_STEP, "parameter")
    [well, _] = pool.run(2, followed, str(undisturbed.path), recipe)
    assert (result["state"], result["rollbacks"]) == ("finished", 1)
    curves = [[(row["step"], row["loss"]) for row in read_metrics(one)] for one in (run, undisturbed)]
    assert curves[0] == curves[1]
    assert all(torch.equal(weight, well["weights"][name]) for name, weight in result["weights"].items())
    [event] = [event for event in read_events(run) if event["event"] == "rollback"]
    assert (event["kind"], event["to_step"]) == ("silent-corruption", 4)
    assert "positions" not in event, "no sample is to blame"


@pytest.mark.slow
@pytest.mark.parametrize("dimension", ["tensor", "shard", "pipeline", "context"])
def test_replicas_of_a_part_are_compared_with_each_other(pool: Pool, run: RunDirectory, dimension: str) -> None:
    mesh = {dimension: 2, "replicate": 2}
    plan: dict[str, Any] = {"mesh": mesh, **({"accumulate": 2} if dimension == "pipeline" else {})}
    recipe = marked_recipe({}, plan=plan)
    results = pool.run(4, flipped, str(run.path), recipe, 3, FLIP_STEP, "parameter")
    assert all(result["error"]["tensor"] == TENSOR for result in results)
    assert set(results[0]["error"]["ranks"]) in ({1, 3}, {3})


@pytest.mark.slow
def test_without_replicas_there_is_nothing_to_compare(pool: Pool, run: RunDirectory) -> None:
    [result, _] = pool.run(2, flipped, str(run.path), marked_recipe({}, plan={"mesh": {"shard": 2}}), 1, 5, "parameter")
    assert result["state"] == "finished"
