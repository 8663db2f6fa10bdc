"""Real runs leave records that prove what they trained on, whatever happened to them on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from training_cases import CLUSTER, recipe_for, trained
from user_runs import HERE, attempt, line_recipe

from gradus.checkpoint.manifest import committed_steps
from gradus.data.audit import Audit, audit, plain_stream
from gradus.data.lineage import read_records
from gradus.parallel.world import World
from gradus.planner.defaults import default_plan
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.schema.recipe import Recipe
from gradus.training.live_run import LiveRun
from gradus.training.loop import train


def audited(run: RunDirectory) -> Audit:
    newest = max(committed_steps(run.checkpoints), default=None)
    return audit(read_records(run), newest, lambda attempt, described: plain_stream(described))


def test_a_run_that_stopped_and_went_on_with_other_ranks_and_workers_is_proven(pool: Pool, run: RunDirectory) -> None:
    recipes = [line_recipe(steps=16, plan={"workers": workers, "checkpoint_every": 3}) for workers in (0, 1, 0)]
    for number, (ranks, stop_step) in enumerate(((1, 4), (2, 9), (1, None))):
        run.stop_file.unlink(missing_ok=True)
        done = pool.run(ranks, trained, str(run.path), recipes[number], number + 1, stop_step)
    assert done[0]["step"] == 16
    found = audited(run)
    assert not found.findings
    assert (found.steps, found.samples, found.ranks) == (16, 128, 2)
    assert [number for number, *_ in found.attempts] == [1, 2, 3]
    assert (found.seen[0].samples, found.seen[0].fewest, found.seen[0].most) == (58, 2, 3)


@pytest.mark.parametrize("mesh", [{"tensor": 2, "replicate": 2}, {"pipeline": 2}, {"context": 2}])
def test_ranks_that_share_their_samples_write_one_log(pool: Pool, run: RunDirectory, mesh: dict[str, int]) -> None:
    recipe = recipe_for("gpt", steps=3, plan={"mesh": mesh})
    attempt(pool, run, recipe, ranks=mesh.get("replicate", 1) * 2)
    found = audited(run)
    assert not found.findings
    assert found.ranks == mesh.get("replicate", 1) == len(list(run.samples.iterdir()))


def mistrained(world: World, folder: str, recipe: Recipe) -> None:
    """Rank 1 takes the samples of rank 0."""
    plan = default_plan(recipe, CLUSTER, world.size).plan
    live = LiveRun.from_recipe(recipe, plan, RunDirectory(Path(folder)), 1, world)
    wrong = replace(live.loader.slices, data_rank=0)
    live.loader.slices = live.loader._fetch._slices = wrong
    live.recorder.close(state=train(live).state)


def test_a_rank_that_trains_on_the_samples_of_another_is_found(pool: Pool, run: RunDirectory) -> None:
    pool.run(2, mistrained, str(run.path), line_recipe(steps=2))
    found = audited(run)
    assert {finding.kind for finding in found.findings} == {"trained-twice", "never-trained"}
    assert "by ranks 0, 1" in found.findings[0].message


def test_data_that_changed_is_refused_and_on_request_accepted_with_a_note(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, line_recipe(steps=4))
    more: dict[str, Any] = {"use": f"{HERE}:Points", "samples": 96}
    with pytest.raises(AssertionError, match=r"58 training samples, found 86.*"):
        attempt(pool, run, line_recipe(data=more, steps=8), 2)
    run.attempt_path(3).mkdir()
    run.changed_data_mark(3).touch()
    assert attempt(pool, run, line_recipe(data=more, steps=8), 3)[0]["step"] == 8
    notes = [event["message"] for event in read_events(run) if event["event"] == "data"]
    assert any("goes on with changed data, as asked" in note and "found 86" in note for note in notes)
    found = audited(run)
    assert not found.findings
    assert [seen.samples for seen in found.seen] == [58, 86]


def test_positions_are_left_out_from_a_restart_on_without_being_other_data(pool: Pool, run: RunDirectory) -> None:
    points: dict[str, Any] = {"use": f"{HERE}:Points"}
    attempt(pool, run, line_recipe(data={**points, "skip": [[8, 10]]}, steps=4))  # 32 samples: up to position 33
    with pytest.raises(AssertionError, match=r"data.skip: of positions 30 to 39, the run has trained on 30 to 33"):
        attempt(pool, run, line_recipe(data={**points, "skip": [[30, 40]]}, steps=8), 2)
    skip = [[36, 46]]  # and what was left out before, which need not be said again
    assert attempt(pool, run, line_recipe(data={**points, "skip": skip}, steps=8), 3, ranks=2)[0]["step"] == 8
    found = audited(run)
    assert not found.findings
    assert found.skipped == [(8, 10), (36, 46)]
    told = [event["message"] for event in read_events(run) if "left out" in event.get("message", "")]
    assert told[-1] == "positions 8 to 9, 36 to 45 of the stream are left out (data.skip)"
    attempt(pool, run, line_recipe(data=points, steps=12), 4)
    assert audited(run).skipped == [(8, 10), (36, 46)]
    assert not audited(run).findings


def test_a_run_on_staged_data_is_the_same_run(pool: Pool, run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "web.txt").write_text("of cats and dogs and of the bird that sang " * 400)
    data = {"use": "text", "path": str(tmp_path / "web.txt"), "cache": str(tmp_path / "cache")}
    attempt(pool, run, recipe_for("gpt", steps=2, data={**data, "stage": str(tmp_path / "node")}), 1, ranks=2)
    assert attempt(pool, run, recipe_for("gpt", steps=4, data=data), 2)[0]["step"] == 4
    (staged,) = [event for event in read_events(run) if event["event"] == "staging"]
    assert staged["here"]
    assert staged["copied_bytes"] > 0
    assert not audited(run).findings
