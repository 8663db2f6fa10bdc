"""Checkpoints that are written to a node's own disk first are in the run's folder in the end, and nothing is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

from pool import Pool
from training_cases import recipe_for, run_on, trained

from gradus.checkpoint.manifest import committed_steps
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics


def test_a_run_that_stopped_goes_on_from_what_is_on_the_disk_of_its_node(pool: Pool, tmp_path: Path) -> None:
    checkpoint = {"every": 2, "keep": 9, "local": str(tmp_path / "node")}
    recipe = recipe_for("gpt", steps=12, deterministic=True, checkpoint=checkpoint)
    expected = run_on(pool, 2, tmp_path, recipe_for("gpt", steps=12, deterministic=True))
    run = RunDirectory.create(tmp_path, "tier")
    stopped = pool.run(2, trained, str(run.path), recipe, 1, 2)[0]["step"]
    assert max(committed_steps(run.checkpoints)) == stopped < 12
    local = tmp_path / "node" / f"{run.name}-{run.id}"
    assert (local / f"step-{stopped:08d}").is_dir()
    # As if the shared folder had never seen the last one: only the node has it.
    shutil.rmtree(run.checkpoints / f"step-{stopped:08d}")
    run.stop_file.unlink()
    pool.run(2, trained, str(run.path), recipe, 2)
    resumed = [event for event in read_events(run) if event["event"] == "resume"]
    assert [event["step"] for event in resumed] == [stopped]
    assert [row["loss"] for row in read_metrics(run)] == [row["loss"] for row in expected.rows]
    assert not local.exists(), "of a run that is finished, nothing is left on the node"
