"""`gradus train --dry-run` builds everything, makes one step, and leaves nothing behind unless it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradus_command import status, wait_until


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def test_it_makes_one_step_on_all_ranks_and_leaves_nothing_behind(gradus, temporary):
    before = sorted(gradus.folder.rglob("*"))
    recipe = gradus.recipe(steps=100000)
    done = gradus("train", recipe, "--nproc", "2", "--dry-run", "--json", TMPDIR=str(temporary))
    assert done.code == 0, done.err
    document = done.json
    assert (document["dry_run"], document["run"], document["step"]) == (True, None, 1)
    assert any("parameters" in line for line in document["summary"])
    assert not list(temporary.iterdir())
    assert sorted(gradus.folder.rglob("*")) == sorted({*before, gradus.folder / recipe})


def test_it_works_in_this_process_and_tells_people_what_was_built(gradus, temporary):
    done = gradus("train", gradus.recipe(steps=100000), "--dry-run", "--debug", TMPDIR=str(temporary))
    assert done.code == 0, done.err
    assert "5 parameters" in done.out
    assert "nothing was kept" in done.out
    assert not gradus.runs.exists()


def test_its_checkpoint_is_written_where_runs_are_and_what_was_there_stays(gradus, tmp_path):
    (tmp_path / "runs").mkdir()
    process = gradus.start(
        "train", gradus.recipe(), "--dry-run", "--runs", str(tmp_path / "runs"), EVALUATION_SECONDS="1"
    )
    wait_until(lambda: list((tmp_path / "runs").glob(".dry-run-*/own/*/checkpoints")), process)
    assert gradus.end(process).code == 0
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]


def test_bad_input_leaves_nothing_behind(gradus, tmp_path):
    done = gradus("train", gradus.recipe(), "--dry-run", "--run-id", "a/b", "--runs", str(tmp_path / "new" / "runs"))
    assert done.code == 2
    assert not list(tmp_path.iterdir())


def test_one_that_fails_keeps_its_log(gradus, temporary):
    recipe = gradus.recipe(model={"use": "own.py:broken_model", "width": 3})
    done = gradus("train", recipe, "--dry-run", "--json", TMPDIR=str(temporary))
    assert done.code == 2
    assert "KeyError: 'missing'" in done.json["error"]["message"]
    run = Path(done.json["run"])
    assert run.is_relative_to(gradus.runs)
    assert gradus("runs", "--json").json == []
    assert status(run)["state"] == "failed"
    assert Path(done.json["error"]["log"]).is_file()


def test_there_is_nothing_to_resume(gradus):
    done = gradus("train", gradus.recipe(), "--dry-run", "--resume", "x", "--json")
    assert (done.code, done.json["error"]["field"]) == (2, "--dry-run")
