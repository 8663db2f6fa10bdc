"""`gradus train --dry-run` builds everything, makes one step, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradus_command import wait_until


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def left_in(temporary: Path) -> list[Path]:
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]  # a cache of torch's


def test_it_makes_one_step_on_all_ranks_and_leaves_nothing_behind(gradus, temporary):
    before = sorted(gradus.folder.rglob("*"))
    recipe = gradus.recipe(steps=100000)
    done = gradus("train", recipe, "--nproc", "2", "--dry-run", "--json", TMPDIR=str(temporary))
    assert done.code == 0, done.err
    document = done.json
    assert (document["dry_run"], document["run"], document["step"]) == (True, None, 1)
    assert any("parameters" in line for line in document["summary"])
    assert not left_in(temporary)
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


def test_one_that_fails_tells_the_end_of_its_log_and_leaves_nothing_behind(gradus, temporary):
    recipe = gradus.recipe(model={"use": "own.py:broken_model", "width": 3})
    done = gradus("train", recipe, "--dry-run", "--json", TMPDIR=str(temporary))
    assert done.code == 2
    assert "KeyError: 'missing'" in done.json["error"]["message"]
    assert "KeyError: 'missing'" in done.json["error"]["output"]
    assert "log" not in done.json["error"]
    assert not gradus.runs.exists()
    assert done.json["run"] is None
    assert gradus("runs", "--json").json == []
    assert not left_in(temporary)


@pytest.mark.slow  # quickly: the test above, and those in this process below
def test_people_are_told_why_one_failed_and_nothing_stays(gradus, tmp_path):
    runs = tmp_path / "new" / "runs"
    recipe = gradus.recipe(model={"use": "own.py:broken_model", "width": 3})
    done = gradus("train", recipe, "--dry-run", "--runs", str(runs))
    assert done.code == 2
    assert "KeyError: 'missing'" in done.err
    assert "log:" not in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_of_one_that_fails_in_this_process_nothing_stays(gradus, tmp_path, as_json):
    recipe = gradus.recipe(model={"use": "own.py:broken_model", "width": 3})
    done = gradus("train", recipe, "--dry-run", "--debug", "--runs", str(tmp_path / "new" / "runs"), *as_json)
    assert done.code != 0
    assert "KeyError: 'missing'" in done.out + done.err
    assert not list(tmp_path.iterdir())


def test_there_is_nothing_to_resume(gradus):
    done = gradus("train", gradus.recipe(), "--dry-run", "--resume", "x", "--json")
    assert (done.code, done.json["error"]["field"]) == (2, "--dry-run")
