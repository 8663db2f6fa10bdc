import re
import stat
import threading

import pytest

from gradus.record.directory import RunDirectory, find_runs
from gradus.schema.errors import InputError


def test_a_new_run_has_a_sortable_id_and_private_folders(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "quickstart")
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", run.id)
    assert run.path == tmp_path / "runs" / "quickstart" / run.id
    for folder in (tmp_path / "runs", run.path.parent, run.path, run.control, run.checkpoints, run.events):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_an_id_that_exists_is_refused_and_left_alone(tmp_path):
    run = RunDirectory.create(tmp_path, "quickstart", "mine")
    run.stop_file.touch()
    with pytest.raises(InputError, match="run directory exists") as refusal:
        RunDirectory.create(tmp_path, "quickstart", "mine")
    assert "--resume" in refusal.value.hint
    assert run.stop_file.exists()


def test_many_runs_made_in_the_same_second_all_get_their_own_directory(tmp_path, monkeypatch):
    ids = iter(["same", "same", "other"])
    monkeypatch.setattr("gradus.record.directory._new_id", lambda: next(ids))
    assert [RunDirectory.create(tmp_path, "quickstart").id for _ in range(2)] == ["same", "other"]


@pytest.mark.parametrize(("name", "run_id"), [("quickstart", "x" * 300), ("..", None), ("a/b", None), ("ok", "../up")])
def test_a_failed_create_leaves_nothing(tmp_path, name, run_id):
    with pytest.raises(InputError):
        RunDirectory.create(tmp_path / "runs", name, run_id)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(InputError, match="Not a directory"):
        RunDirectory.create(tmp_path / "runs", "quickstart")


def test_a_run_opens_by_path_id_name_and_id_or_as_the_newest_of_its_name(tmp_path):
    older = RunDirectory.create(tmp_path, "quickstart", "b-older")
    newer = RunDirectory.create(tmp_path, "quickstart", "a-newer")
    RunDirectory.create(tmp_path, "another")
    newer.new_attempt()
    for text in (str(older.path), "b-older", "quickstart/b-older"):
        assert RunDirectory.open(text, tmp_path) == older
    assert RunDirectory.open("quickstart", tmp_path) == newer


def test_an_own_loop_that_was_launched_is_found_under_the_name_of_its_recipe_too(tmp_path):
    older = RunDirectory.create(tmp_path, "own-loop", "by-itself")
    launched = RunDirectory.create(tmp_path, "train", "launched")
    attempt = launched.new_attempt()
    (launched.attempt_path(attempt) / "recipe.yaml").write_text("name: own-loop\nbatch: 8\n")
    assert RunDirectory.open("own-loop", tmp_path) == older, "a script's run has no recipe of its own"
    launched.own_loop_mark(attempt).touch()
    for name in ("own-loop", "train"):
        assert RunDirectory.open(name, tmp_path) == launched
    assert launched.name_in_loop == "own-loop"
    assert older.name_in_loop is None


def test_what_is_no_run_is_refused_with_the_nearest_ids(tmp_path):
    RunDirectory.create(tmp_path, "quickstart", "first-try")
    (tmp_path / "quickstart" / "notes").mkdir()
    with pytest.raises(InputError, match="not a run") as refusal:
        RunDirectory.open("first-tri", tmp_path)
    assert "first-try" in refusal.value.hint
    with pytest.raises(InputError, match="not a run"):
        RunDirectory.open("quickstart/notes", tmp_path)


def test_an_id_of_two_names_is_ambiguous(tmp_path):
    RunDirectory.create(tmp_path, "one", "same")
    RunDirectory.create(tmp_path, "two", "same")
    with pytest.raises(InputError, match=r"ambiguous.*one/same"):
        RunDirectory.open("same", tmp_path)


def test_the_run_started_last_comes_first(tmp_path):
    assert find_runs(tmp_path / "nowhere") == []
    first, second = RunDirectory.create(tmp_path, "one", "z"), RunDirectory.create(tmp_path, "two", "a")
    second.new_attempt()
    assert find_runs(tmp_path) == [second, first]
    first.new_attempt()
    assert find_runs(tmp_path) == [first, second]


def test_no_two_launchers_get_the_same_attempt(run):
    claimed: list[int] = []
    threads = [threading.Thread(target=lambda: claimed.append(run.new_attempt())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == run.attempts == [1, 2, 3, 4, 5, 6, 7, 8]
    run.log_path(3, "node-1").touch()


def test_an_attempt_is_there_with_all_its_files_or_not_at_all(run, monkeypatch):
    """A launcher may be killed at any moment, and the run must go on from an attempt that can be read."""
    assert run.never_began
    assert run.new_attempt({"recipe.yaml": "one", "plan.yaml": "one"}) == 1
    assert not run.never_began

    def killed(self, text):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        run.new_attempt({"recipe.yaml": "two"})
    monkeypatch.undo()
    assert run.attempts == [1]
    assert run.new_attempt({"recipe.yaml": "two"}) == 2
    assert (run.attempt_path(2) / "recipe.yaml").read_text() == "two"
