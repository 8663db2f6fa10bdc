"""Retention: what stays when a newer checkpoint is there; and what goes is never taken for whole on its way out."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradus.checkpoint.manifest import COMMITTED, DamagedCheckpoint
from gradus.checkpoint.part import lay_out, part_name, write_part
from gradus.checkpoint.retention import Cleared, Retention, clear_leftovers, kept, passed_over, prune, remove
from gradus.checkpoint.store import CheckpointStore


def store_with(folder: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(folder)
    for step in steps:
        store.save(step, {"w": torch.full((2,), float(step))}, {})
    return store


def test_the_newest_and_the_best_stay() -> None:
    steps = [1, 2, 3, 4, 5]
    assert kept(steps, 5, Retention(keep=2)) == {4, 5}
    assert kept(steps, 5, Retention(keep=2, best=2)) == {2, 4, 5}
    assert kept(steps, 5, Retention(keep=2, best=99)) == {4, 5}
    assert kept(steps, 5, Retention(keep=7)) == {1, 2, 3, 4, 5}


def test_so_does_the_first_at_or_after_each_multiple() -> None:
    assert kept(range(10, 250, 10), 240, Retention(keep=2, every=100)) == {100, 200, 230, 240}
    # Saved by the clock: no step is a multiple.
    assert kept([37, 81, 122, 163, 204, 246, 288], 288, Retention(keep=1, every=100)) == {122, 204, 288}
    assert kept([50, 90], 90, Retention(keep=1, every=100)) == {90}, "the beginning is no milestone"


def test_those_that_a_resume_has_passed_over_do_not_stay() -> None:
    """10 was found damaged: the run went on from 5, and 6 is the newest that can be trusted."""
    assert kept([5, 10, 6], 6, Retention(keep=1)) == {6}
    assert kept([5, 10, 6], 6, Retention(keep=5, every=1, best=10)) == {5, 6}


@given(
    st.lists(st.integers(1, 400), min_size=1, unique=True),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 90)),
)
def test_deleting_as_one_goes_leaves_what_deleting_at_the_end_would(
    steps: list[int], keep: int, every: int | None
) -> None:
    """Milestones do not depend on when somebody looked: one that was kept once stays."""
    retention = Retention(keep, every)
    there: set[int] = set()
    for step in sorted(steps):
        there = kept(there | {step}, step, retention)
    assert there == kept(steps, max(steps), retention)
    assert max(steps) in there
    assert len(there) >= min(keep, len(steps))


def test_what_need_not_stay_is_deleted(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3, 4, 5)
    assert prune(tmp_path, 5, Retention(keep=2, best=2)).steps == [1, 3]
    assert store.steps() == [2, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [store.path(step).name for step in (2, 4, 5)]


def test_what_was_left_half_written_goes_too_but_not_what_may_be_under_way(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10, 20)
    layout = lay_out(part_name(0, 1), [("w", "U8", (1,), (0,), (1,))])
    for step in (5, 15, 25):
        write_part(store.path(step), layout, lambda start, stop: b"x", abandoned=lambda: False)
    (tmp_path / "step-00000003.removed").mkdir()
    (tmp_path / "notes.txt").write_text("of somebody's own")
    (tmp_path / "step-by-step").mkdir()
    assert prune(tmp_path, 20, Retention(keep=1)).steps == [10]
    left = {"step-00000020", "step-00000025", "notes.txt", "step-by-step"}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert clear_leftovers(tmp_path).gone == [store.path(25)]
    assert {path.name for path in tmp_path.iterdir()} == left - {"step-00000025"}


def test_only_what_is_committed_makes_others_go(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10, 20)
    (store.path(20) / COMMITTED).unlink()
    with pytest.raises(AssertionError, match="step 20 is not committed"):
        prune(tmp_path, 20, Retention(keep=1))
    assert store.steps() == [10]


class Killed(BaseException):
    pass


def test_a_checkpoint_that_is_half_deleted_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(tmp_path, 10, 20)

    def interrupted(path: Path, **keywords: object) -> None:
        if path.exists():
            (path / part_name(0, 1)).unlink()
            raise Killed

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(Killed):
        prune(tmp_path, 20, Retention(keep=1))
    assert store.steps() == [20]
    assert store.newest()[1] == []
    monkeypatch.undo()
    assert prune(tmp_path, 20, Retention(keep=1)).steps == []
    assert [path.name for path in tmp_path.iterdir()] == [store.path(20).name]


def test_whoever_saves_the_step_anew_meanwhile_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be ahead: it begins to write the step that rank 0 is just deleting as left behind."""
    store = store_with(tmp_path, 30)
    real = shutil.rmtree

    def slow(path: Path, **keywords: object) -> None:
        if path.exists():
            store.save(30, {"w": torch.ones(5)}, {})
        real(path)

    monkeypatch.setattr(shutil, "rmtree", slow)
    remove(store.path(30))
    monkeypatch.undo()
    assert store.open(30).tensors()["w"].shape == (5,)


def test_a_folder_that_is_not_there_has_nothing_left_over(tmp_path: Path) -> None:
    assert clear_leftovers(tmp_path / "nowhere") == Cleared()


def test_those_of_later_steps_are_set_aside_whole_and_the_two_newest_stay(tmp_path: Path) -> None:
    """A run that could not use 10, 20 and 30 has begun anew: what it left may be all there is of days of training."""
    store = store_with(tmp_path, 10, 20, 30, 5)
    cleared = prune(tmp_path, 5, Retention(keep=1))
    assert [path.name for path in cleared.set_aside] == ["step-00000010", "step-00000020", "step-00000030"]
    assert store.steps() == [5]
    assert list(passed_over(tmp_path)) == [20, 30]
    assert clear_leftovers(tmp_path) == Cleared(), "they are nobody's leftovers"
    assert prune(tmp_path, 5, Retention(keep=1)) == Cleared()
    passed_over(tmp_path)[30].rename(store.path(30))
    assert store.open(30).tensors()["w"].tolist() == [30.0, 30.0]
    store_with(tmp_path, 6)
    prune(tmp_path, 6, Retention(keep=1))
    assert (store.steps(), list(passed_over(tmp_path))) == ([6], [20, 30])


def test_nothing_is_deleted_for_a_checkpoint_that_is_not_as_it_was_written(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    flip_last_byte(store.path(2) / part_name(0, 1))
    with pytest.raises(DamagedCheckpoint, match="step-00000002"):
        prune(tmp_path, 2, Retention(keep=1))
    assert store.steps() == [1, 2]


def test_where_nothing_is_to_be_deleted_nothing_is_read(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    flip_last_byte(store.path(2) / part_name(0, 1))
    assert prune(tmp_path, 2, Retention(keep=2)) == Cleared()


def flip_last_byte(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_what_cannot_be_deleted_is_told_and_keeps_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file that somebody has open on NFS, or one of another user."""
    store = store_with(tmp_path, 1, 2, 3)
    for step in (11, 12, 13):
        store.path(step).mkdir()
    real = shutil.rmtree

    def busy(path: Path, **keywords: object) -> None:
        if path.exists() and path.name.startswith(("step-00000001.", "step-00000012.")):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path / ".nfs0001"))
        real(path)

    monkeypatch.setattr(shutil, "rmtree", busy)
    cleared = prune(tmp_path, 3, Retention(keep=1))
    assert cleared.steps == [2]
    assert len(cleared.problems) == 2, "once as a checkpoint, once as what is left of it"
    assert all("step-00000001" in problem and ".nfs0001" in problem for problem in cleared.problems)
    cleared = clear_leftovers(tmp_path)
    assert cleared.gone == [store.path(11), store.path(13)]
    assert [problem.split(": ")[0] for problem in cleared.problems] == [
        str(store.path(1)) + ".removed",
        str(store.path(12)),
    ]
    assert store.steps() == [3]
