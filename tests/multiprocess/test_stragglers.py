"""A rank that is slow by itself is told apart from those that wait for it, wherever it is slow."""

from __future__ import annotations

import json

import pytest
from watch_cases import own_times, slow_recipe

from gradus.record.directory import RunDirectory
from gradus.record.events import read_events

SECONDS = 0.08  # far above what a step of the model takes, also where ranks have to share a core


@pytest.mark.parametrize(
    ("where", "sharded"),
    [("forward", False), ("backward", False), ("hook", False), ("data", False), ("hook", True)],
)
def test_others_wait_as_long_as_one_rank_takes_longer(pool, tmp_path, where, sharded):
    slept = SECONDS / 2 if where == "data" else SECONDS  # for each of two samples
    recipe = slow_recipe(tmp_path, **{where: slept})
    if sharded:
        mesh = recipe.plan.mesh.model_copy(update={"shard": 2, "replicate": 1})
        plan = recipe.plan.model_copy(update={"mesh": mesh, "zero": 3})
        recipe = recipe.model_copy(update={"plan": plan})
    run = RunDirectory.create(tmp_path, recipe.name)
    waits, slow = pool.run(2, own_times, str(run.path), recipe)
    assert slow["work"] >= 0.95 * SECONDS
    assert waits["step"] - waits["work"] >= 0.8 * SECONDS, "what it waited for is not its own"
    assert slow["data"] >= 0.95 * SECONDS if where == "data" else slow["data"] < 0.5 * SECONDS


def test_a_slow_rank_is_named_in_an_event_and_in_the_health_of_the_run(pool, tmp_path):
    recipe = slow_recipe(tmp_path, steps=40, forward=SECONDS)
    run = RunDirectory.create(tmp_path, recipe.name)
    pool.run(2, own_times, str(run.path), recipe)
    (found,) = [event for event in read_events(run) if event["event"] == "straggler"]
    assert found["rank"] == 1
    assert found["since_step"] <= 10
    assert found["why"] == "computing"
    assert "rank 1" in found["message"]
    health = json.loads((run.path / "health.json").read_text())
    assert [rank["rank"] for rank in health["ranks"]] == [0, 1]
    assert [one["rank"] for one in health["stragglers"]] == [1]
    assert set(health["ranks"][0]) == {
        *("rank", "node", "step", "phase", "phase_seconds", "own_seconds", "data_seconds", "memory_peak_bytes")
    }
