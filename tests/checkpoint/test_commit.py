"""Commit: the parts of all ranks become one checkpoint when all are there and fit together, and not before."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradus.checkpoint import part
from gradus.checkpoint.commit import Abandoned, NotWhole, commit, tiles
from gradus.checkpoint.manifest import COMMITTED, MANIFEST
from gradus.checkpoint.part import lay_out, part_name, read_record, write_part, write_record
from gradus.checkpoint.store import CheckpointStore

Box = tuple[tuple[int, ...], tuple[int, ...]]


def never() -> bool:
    return False


def write(
    folder: Path, rank: int, ranks: int, boxes: list[Any], fill: int = 1, save_id: str = "1", held: Any = ()
) -> None:
    """A rank's part: the same byte everywhere."""
    layout = lay_out(part_name(rank, ranks), boxes)
    record = write_part(
        folder, layout, lambda start, stop: bytes([fill]) * (stop - start), abandoned=never, save_id=save_id, held=held
    )
    write_record(folder, record)


def rows(first: int, count: int, name: str = "w", dtype: str = "U8", of: int = 4) -> Any:
    return (name, dtype, (of, 2), (first, 0), (count, 2))


def test_boxes_of_ranks_are_one_tensor(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000005"
    write(folder, 0, 2, [rows(0, 3)], fill=1)
    write(folder, 1, 2, [rows(3, 1)], fill=2)
    commit(folder, 5, 2, {"state": {"x": 1}, "samples": 40}, abandoned=never, save_id="1")
    opened = CheckpointStore(tmp_path).open(5)
    assert opened.tensors()["w"].tolist() == [[1, 1], [1, 1], [1, 1], [2, 2]]
    assert (opened.state, opened.manifest["samples"], opened.manifest["recipe_hash"]) == ({"x": 1}, 40, None)
    assert not list(folder.glob("*.json.partial"))
    assert sorted(path.name for path in folder.glob("part-*")) == [part_name(0, 2), part_name(1, 2)]


def test_of_boxes_that_several_have_written_the_lowest_rank_s_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000005"
    for rank in (0, 1, 2):
        write(folder, rank, 3, [rows(0, 4)], fill=rank + 1)
    commit(folder, 5, 3, {"state": {}}, abandoned=never, save_id="1")
    assert CheckpointStore(tmp_path).open(5).tensors()["w"].unique().tolist() == [1]


WRONG = {
    "a row is missing": [[rows(0, 2)], [rows(3, 1)]],
    "the end is missing": [[rows(0, 2)], [rows(2, 1)]],
    "a row is there twice": [[rows(0, 3)], [rows(2, 2)]],
    "another type": [[rows(0, 2)], [rows(2, 2, dtype="I8")]],
    "another shape": [[rows(0, 2)], [rows(2, 2, of=5)]],
    "beyond the end": [[rows(0, 4)], [rows(4, 1)]],
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_whole_is_not_committed(tmp_path: Path, case: str) -> None:
    for rank, boxes in enumerate(WRONG[case]):
        write(tmp_path, rank, 2, boxes)
    with pytest.raises(NotWhole, match="w "):
        commit(tmp_path, 5, 2, {"state": {}}, abandoned=never, save_id="1")
    assert not (tmp_path / COMMITTED).exists()


def test_a_part_that_is_not_as_long_as_its_record_says_is_not_committed(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, [rows(0, 4)])
    os.truncate(tmp_path / part_name(0, 1), 20)
    with pytest.raises(NotWhole, match="has 20 bytes"):
        commit(tmp_path, 5, 1, {"state": {}}, abandoned=never, save_id="1")
    assert not (tmp_path / COMMITTED).exists()


def test_a_tensor_that_a_rank_holds_and_none_has_written_is_missed(tmp_path: Path) -> None:
    for rank in (0, 1):
        held = ["w", "v"] if rank else ["w"]
        write(tmp_path, rank, 2, [rows(2 * rank, 2)], held=held)
    with pytest.raises(NotWhole, match=r"00001-of-00002\S+ holds were written by none, the first of them v"):
        commit(tmp_path, 5, 2, {"state": {}}, abandoned=never, save_id="1")
    assert not (tmp_path / COMMITTED).exists()


def test_what_is_committed_stays_so_when_the_same_save_commits_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk failed right after COMMITTED had its name, or whoever committed it was killed there."""
    folder = tmp_path / "step-00000005"
    write(folder, 0, 1, [rows(0, 4)])
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if (folder / COMMITTED).exists():
            raise OSError(errno.EIO, "the server is away")
        fsync(descriptor)

    monkeypatch.setattr(part.os, "fsync", failing)
    with pytest.raises(OSError, match="away"):
        commit(folder, 5, 1, {"state": {}}, abandoned=never, save_id="1")
    monkeypatch.undo()
    before = (folder / COMMITTED).stat().st_ino
    for _ in range(2):  # also when the records are gone
        commit(folder, 5, 1, {"state": {}}, abandoned=lambda: True, save_id="1")
        assert (folder / COMMITTED).stat().st_ino == before
        assert sorted(path.name for path in folder.iterdir()) == [COMMITTED, MANIFEST, part_name(0, 1)]
    with pytest.raises(Abandoned):  # another save of the same step is another matter
        commit(folder, 5, 1, {"state": {}}, abandoned=lambda: True, save_id="2")


def test_it_waits_for_the_slowest_rank(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000005"
    write(folder, 0, 2, [rows(0, 2)])
    late = threading.Timer(0.3, write, (folder, 1, 2, [rows(2, 2)]))
    late.start()
    commit(folder, 5, 2, {"state": {}}, abandoned=never, save_id="1")
    late.join()
    assert CheckpointStore(tmp_path).steps() == [5]


def test_what_an_earlier_save_left_is_not_taken_for_this_one_s(tmp_path: Path) -> None:
    """A save of the same step was cut short after one rank was done; what that rank wrote then is another state."""
    folder = tmp_path / "step-00000005"
    write(folder, 1, 2, [rows(2, 2)], fill=7, save_id="before")
    write(folder, 0, 2, [rows(0, 2)], fill=1)
    waits = iter([False] * 5 + [True])
    with pytest.raises(Abandoned):
        commit(folder, 5, 2, {"state": {}}, abandoned=lambda: next(waits), save_id="1")
    write(folder, 1, 2, [rows(2, 2)], fill=2)
    commit(folder, 5, 2, {"state": {}}, abandoned=never, save_id="1")
    assert CheckpointStore(tmp_path).open(5).tensors()["w"][:, 0].tolist() == [1, 1, 2, 2]


def test_the_order_in_which_things_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is flushed before it gets its name, names are flushed before COMMITTED, and COMMITTED is last."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        fsync(descriptor)
        done.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.removesuffix('.partial')}")

    def named(source: Path, target: Path) -> None:
        replace(source, target)
        done.append(f"name {Path(target).name}")

    monkeypatch.setattr(part.os, "fsync", flushed)
    monkeypatch.setattr(part.os, "replace", named)
    folder = tmp_path / "step-00000005"
    write(folder, 0, 1, [rows(0, 4)])
    commit(folder, 5, 1, {"state": {}}, abandoned=never, save_id="1")
    tensors, record = part_name(0, 1), "part-00000-of-00001.json"
    expected = [f"flush {tensors}", f"name {tensors}", f"flush {record}", f"name {record}", f"flush {folder.name}"]
    expected += [f"flush {MANIFEST}", f"name {MANIFEST}", f"flush {folder.name}"]
    expected += [f"flush {COMMITTED}", f"name {COMMITTED}", f"flush {folder.name}", f"flush {tmp_path.name}"]
    assert done == expected


class Killed(BaseException):
    pass


def test_killed_at_any_moment_there_is_the_new_checkpoint_or_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment is any call that changes what is on the disk."""
    store = CheckpointStore(tmp_path)
    store.save(20, {"w": torch.ones(3)}, {})
    real = {name: getattr(os, name) for name in ("open", "pwrite", "fsync", "replace", "unlink")}
    outcomes = []
    for moment in itertools.count():
        calls = itertools.count()

        def dying(name: str, moment: int = moment, calls: Any = calls) -> Any:
            def wrapped(*arguments: Any, **keywords: Any) -> Any:
                if next(calls) >= moment:
                    raise Killed
                return real[name](*arguments, **keywords)

            return wrapped

        for name in real:
            monkeypatch.setattr(os, name, dying(name))
        finished = False
        try:
            store.save(30, {"w": torch.full((3,), 5.0)}, {})
            finished = True
        except Killed:
            pass
        for name, function in real.items():
            monkeypatch.setattr(os, name, function)
        newest, damaged = store.newest()
        assert newest is not None
        assert damaged == []
        assert newest.tensors()["w"].tolist() == ([5.0] * 3 if newest.step == 30 else [1.0] * 3)
        outcomes.append(newest.step)
        if finished:
            break
        if newest.step == 30:
            (store.path(30) / COMMITTED).unlink()  # and its files are left, for the next save to find
    assert outcomes == sorted(outcomes)
    assert {20, 30} == set(outcomes)
    assert len(outcomes) > 15


def test_a_commit_that_failed_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "step-00000005"
    write(folder, 0, 1, [rows(0, 4)])
    replace = os.replace
    for failing in (MANIFEST, COMMITTED):

        def refused(source: Path, target: Path, failing: str = failing) -> None:
            if Path(target).name == failing:
                raise OSError("the server is away")
            replace(source, target)

        monkeypatch.setattr(part.os, "replace", refused)
        with pytest.raises(OSError, match="away"):
            commit(folder, 5, 1, {"state": {}}, abandoned=never, save_id="1")
        assert CheckpointStore(tmp_path).steps() == []
        assert read_record(folder, 0, 1) is not None
    monkeypatch.undo()
    commit(folder, 5, 1, {"state": {}}, abandoned=never, save_id="1")
    assert CheckpointStore(tmp_path).open(5).step == 5


def test_every_byte_of_committed_means_something(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000005"
    write(folder, 0, 1, [rows(0, 4)])
    commit(folder, 5, 1, {"state": {}}, abandoned=never, save_id="1")
    assert b" " not in (folder / COMMITTED).read_bytes()
    assert json.loads((folder / COMMITTED).read_bytes())["bytes"] == (folder / MANIFEST).stat().st_size


def filled(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """The same, by counting."""
    count = torch.zeros(shape, dtype=torch.int64)
    for offset, box in boxes:
        if any(low < 0 or low + size > all_ for low, size, all_ in zip(offset, box, shape, strict=True)):
            return False
        count[tuple(slice(low, low + size) for low, size in zip(offset, box, strict=True))] += 1
    return bool((count == 1).all())


@st.composite
def cut(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A whole that is cut in two again and again, of which sometimes one box is dropped, moved or doubled."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        offset, box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box[dim]))
        for first, size in ((0, at), (at, box[dim] - at)):
            low = tuple(o + first * (d == dim) for d, o in enumerate(offset))
            boxes.append((low, tuple(size if d == dim else s for d, s in enumerate(box))))
    if shape and draw(st.booleans()):
        number = draw(st.integers(0, len(boxes) - 1))
        offset, box = boxes[number]
        moved = (tuple(draw(st.integers(-1, 5)) for _ in shape), box)
        boxes[number : number + 1] = draw(st.sampled_from([[], [(offset, box)] * 2, [moved]]))
    return shape, boxes


@given(cut())
def test_boxes_make_a_whole_if_each_number_is_in_one(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    if boxes:  # of none at all nothing can be said
        assert tiles(shape, boxes) == filled(shape, boxes)


def test_nothing_is_made_of_no_box_and_an_empty_tensor_of_an_empty_one() -> None:
    assert not tiles((), [])
    assert not tiles((0, 3), [])
    assert tiles((0, 3), [((0, 0), (0, 3))])
    assert tiles((), [((), ())])
    assert not tiles((2,), [((0, 0), (2, 1))])
