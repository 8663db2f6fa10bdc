"""Reading: any box of a tensor comes out of any pieces, no more blocks are read than it needs, and each is compared."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradus.checkpoint import manifest, part, reading
from gradus.checkpoint.commit import commit
from gradus.checkpoint.manifest import DamagedCheckpoint
from gradus.checkpoint.part import lay_out, part_name, write_part, write_record
from gradus.checkpoint.reading import NAMES, files_kept_open, read_rows, read_tensor, same_bytes
from gradus.checkpoint.store import CheckpointStore
from gradus.checkpoint.tensor_file import StoredTensor, read_header
from gradus.checkpoint.writing import Writable, one_at_a_time, write_tensors
from gradus.parallel.part import Box
from gradus.schema.errors import InputError

BLOCK = 64  # bytes, in place of 4 MiB
SMALL = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that a few rows have several of them, and chunks of four."""
    for module in (part, manifest, reading):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 4 * BLOCK)
    monkeypatch.setattr(reading, "_CACHED_BYTES", 24)
    monkeypatch.setattr(
        part.os, "fsync", lambda descriptor: None
    )  # hundreds of files are written, and nobody is killed


Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def stored_in(folder: Path, tensor: Tensor, boxes: Boxes, step: int = 1) -> StoredTensor:
    """A tensor in a checkpoint of as many parts as there are boxes."""
    store = CheckpointStore(folder)
    path = store.path(step)
    for rank, (offset, shape) in enumerate(boxes):
        held = tensor[tuple(slice(low, low + size) for low, size in zip(offset, shape, strict=True))]
        layout = lay_out(part_name(rank, len(boxes)), [("t", NAMES[tensor.dtype], tensor.shape, offset, shape)])
        data = one_at_a_time(layout, lambda name, held=held: held)  # type: ignore[misc]
        write_record(path, write_part(path, layout, data, abandoned=lambda: False))
    commit(path, step, len(boxes), {"state": {}}, abandoned=lambda: False)
    return store.open(step, every_byte=False).stored()["t"]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], Boxes]:
    """A shape, and boxes that it is cut into."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    boxes: Boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        offset, box = boxes.pop(0)
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box[dim]))
        for first, size in ((0, at), (at, box[dim] - at)):
            if size:
                low = tuple(o + first * (d == dim) for d, o in enumerate(offset))
                boxes.append((low, tuple(size if d == dim else s for d, s in enumerate(box))))
    return shape, boxes


def as_held(monkeypatch: pytest.MonkeyPatch, offset: tuple[int, ...]) -> None:
    """As if a rank held just the box that the target is, from `offset` on."""
    monkeypatch.setattr(reading, "local_part", lambda tensor: Box(tensor.detach(), offset))


@SMALL
@given(case=tilings(), random=st.randoms(use_true_random=False), dtypes=st.sampled_from(["same", "wider", "narrower"]))
def test_any_box_comes_out_of_any_pieces(
    small_blocks: None, tmp_path_factory: pytest.TempPathFactory, case: Any, random: Any, dtypes: str
) -> None:
    shape, boxes = case
    whole = torch.randn(shape, dtype=torch.float64 if dtypes == "narrower" else torch.float32)
    stored = stored_in(tmp_path_factory.mktemp("any"), whole, boxes)
    low = tuple(random.randrange(size) for size in shape)
    high = tuple(random.randrange(first + 1, size + 1) for first, size in zip(low, shape, strict=True))
    expected = whole[tuple(map(slice, low, high))]
    dtype = {"same": whole.dtype, "wider": torch.float64, "narrower": torch.float32}[dtypes]
    target = torch.full(expected.shape, float("nan"), dtype=dtype)
    if random.random() < 0.3:  # memory in another order than that of the file
        target = target.transpose(0, -1).contiguous().transpose(0, -1)
    with pytest.MonkeyPatch.context() as patch:
        as_held(patch, low)
        read_rows(stored, target)
    assert torch.equal(target, expected.to(dtype))


@SMALL
@given(case=tilings(), random=st.randoms(use_true_random=False))
def test_rows_go_where_they_are_sent_also_turned_around(
    small_blocks: None, tmp_path_factory: pytest.TempPathFactory, case: Any, random: Any
) -> None:
    shape, boxes = case
    transposed = len(shape) == 2 and random.random() < 0.6
    wide = random.choice([1, 5])  # rows that are longer than a block, and some that are not
    shape = (*shape[:-1], wide * shape[-1])
    boxes = [((*low[:-1], wide * low[-1]), (*size[:-1], wide * size[-1])) for low, size in boxes]
    whole = torch.randn(shape)
    stored = stored_in(tmp_path_factory.mktemp("runs"), whole, boxes)
    source = whole.T if transposed else whole
    order = list(range(source.shape[0]))
    random.shuffle(order)
    runs = [(theirs, ours, 1) for ours, theirs in enumerate(order)]
    target = torch.full(source.shape, float("nan"))
    read_rows(stored, target, runs, transposed=transposed)
    assert torch.equal(target, source[order])


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


@SMALL
@given(case=tilings(), random=st.randoms(use_true_random=False))
def test_a_flipped_byte_is_found_by_whoever_reads_it(
    small_blocks: None, tmp_path_factory: pytest.TempPathFactory, case: Any, random: Any
) -> None:
    shape, boxes = case
    stored = stored_in(tmp_path_factory.mktemp("flipped"), torch.randn(shape, dtype=torch.float64), boxes)
    piece = random.choice(stored.pieces)
    place = piece.start + random.randrange(piece.byte_count)
    flip(piece.file, place)
    for target in (torch.empty(shape, dtype=torch.float64), torch.empty(shape)):
        with pytest.raises(DamagedCheckpoint, match=rf"{piece.file.name}: bytes \d+ to \d+, of t,"):
            read_rows(stored, target)


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each call has read, from now on."""
    counts: list[int] = []
    real = os.preadv

    def counted(descriptor: int, rooms: Any, at: int) -> int:
        counts.append(real(descriptor, rooms, at))
        return counts[-1]

    monkeypatch.setattr(reading.os, "preadv", counted)
    return counts


def test_only_blocks_with_something_wanted_are_read(
    small_blocks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 32 bytes, two to a block, in two pieces of 5 and 11 rows."""
    whole = torch.arange(128.0).view(16, 8)
    stored = stored_in(tmp_path, whole, [((0, 0), (5, 8)), ((5, 0), (11, 8))])
    counts = counting(monkeypatch)
    cases = {(0, 2): 64, (1, 2): 64, (1, 3): 128, (4, 5): 32, (4, 6): 32 + 64, (5, 7): 64, (6, 8): 128, (15, 16): 32}
    for (first, last), expected in cases.items():
        target = torch.empty(last - first, 8)
        with pytest.MonkeyPatch.context() as patch:
            as_held(patch, (first, 0))
            read_rows(stored, target)
        assert torch.equal(target, whole[first:last])
        assert sum(counts) == expected, (first, last)
        counts.clear()


def test_no_block_is_read_twice_where_rows_do_not_end_with_blocks(
    small_blocks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some columns of rows of 20 bytes, a few at a time: a block that two chunks share is read once."""
    whole = torch.arange(500.0).view(100, 5)
    stored = stored_in(tmp_path, whole, [((0, 0), (100, 5))])
    counts = counting(monkeypatch)
    target = torch.empty(100, 2)
    as_held(monkeypatch, (0, 1))
    read_rows(stored, target)
    assert torch.equal(target, whole[:, 1:3])
    assert sum(counts) == 2000


def test_of_rows_that_are_longer_than_a_block_only_what_is_wanted_is_read(
    small_blocks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As experts that are stacked and divided along their own rows: 40 of 24 bytes each, of which 10 are wanted."""
    whole = torch.randn(3, 40, 6)
    stored = stored_in(tmp_path, whole, [((0, 0, 0), (3, 40, 6))])
    counts = counting(monkeypatch)
    for offset, shape, most in (
        ((1, 16, 0), (2, 10, 6), 2 * (240 + 2 * BLOCK)),
        ((1, 0, 2), (2, 40, 3), 2 * (960 + 2 * BLOCK)),
        ((0, 30, 5), (3, 1, 1), 3 * 2 * BLOCK),
    ):
        expected = whole[tuple(slice(low, low + size) for low, size in zip(offset, shape, strict=True))]
        for target in (torch.empty(shape), torch.empty(shape, dtype=torch.float64)):
            with pytest.MonkeyPatch.context() as patch:
                as_held(patch, offset)
                read_rows(stored, target)
            assert torch.equal(target, expected.to(target.dtype))
            assert sum(counts) <= most
            counts.clear()


def test_no_more_than_a_chunk_is_held_besides_the_tensor(
    small_blocks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randn(200, 6)
    stored = stored_in(tmp_path, whole, [((0, 0), (200, 6))])
    staged: list[int] = []
    real = reading._staging
    monkeypatch.setattr(reading, "_staging", lambda count, device: (staged.append(count), real(count, device))[1])
    for target in (torch.empty(200, 6, dtype=torch.float64), torch.empty(6, 200).T):
        read_rows(stored, target)
        assert torch.equal(target, whole.to(target.dtype))
    assert max(staged) <= 4 * BLOCK


def test_a_copy_is_not_written_over_by_threads_that_read_the_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block is damaged and told of at once, while a thread is still at the later ones."""
    whole = torch.randint(0, 1 << 62, (32 * 1024 * 1024 // 8,))
    stored = stored_in(tmp_path / "shared", whole, [((0,), tuple(whole.shape))])
    piece = stored.pieces[0]
    local = tmp_path / part_name(0, 1)
    local.write_bytes(bytes(piece.file.stat().st_size))
    slow = reading._Source._read_block

    def late(self: Any, memory: memoryview, start: int, number: int) -> None:
        if self._file == local and number:
            time.sleep(0.2)
            memory[:] = bytes(len(memory))
            return
        slow(self, memory, start, number)

    monkeypatch.setattr(reading._Source, "_read_block", late)
    found = read_tensor(replace(stored, pieces=(replace(piece, file=local, copy=piece.file),)))
    time.sleep(0.5)
    assert torch.equal(found, whole)


def test_many_blocks_are_read_by_several_threads_and_damage_in_any_is_told(tmp_path: Path) -> None:
    """Of the real size, and straight into the tensor."""
    whole = torch.randint(0, 1 << 62, (40 * 1024 * 1024 // 8,))
    stored = stored_in(tmp_path, whole, [((0,), tuple(whole.shape))])
    assert torch.equal(read_tensor(stored), whole)
    flip(stored.pieces[0].file, stored.pieces[0].start + 33 * 1024 * 1024)
    with pytest.raises(DamagedCheckpoint, match=f"bytes {stored.pieces[0].start + 32 * 1024 * 1024} to "):
        read_tensor(stored)


def test_a_number_and_nothing_at_all_are_read(tmp_path: Path) -> None:
    number = stored_in(tmp_path / "a", torch.tensor(2.5), [((), ())])
    assert read_tensor(number).item() == 2.5
    nothing = stored_in(tmp_path / "b", torch.empty(0, 3), [((0, 0), (0, 3))])
    assert read_tensor(nothing).shape == (0, 3)
    target = torch.tensor(0.0, dtype=torch.float64)
    read_rows(number, target)
    assert target.item() == 2.5


@pytest.mark.parametrize("harm", ["cut off", "gone", "a folder"])
def test_a_file_that_changes_meanwhile_is_damage(tmp_path: Path, harm: str) -> None:
    stored = stored_in(tmp_path, torch.randn(9, 9), [((0, 0), (9, 9))])
    file = stored.pieces[0].file
    if harm == "cut off":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
        if harm == "a folder":
            file.mkdir()
    with pytest.raises(DamagedCheckpoint, match=file.name):
        read_tensor(stored)


def test_a_file_of_somebody_else_s_has_no_digests_and_is_bad_input_where_it_ends_early(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    whole = torch.randn(9, 9)
    write_tensors(file, {"w": Writable("F32", (9, 9), whole.clone)})
    stored = read_header(file, "x").tensors["w"]
    assert stored.pieces[0].digests is None
    assert torch.equal(read_tensor(stored), whole)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(InputError, match="was it changed meanwhile"):
        read_tensor(stored)


def test_a_copy_on_the_node_is_read_in_place_of_the_shared_file(tmp_path: Path) -> None:
    """Unless it is not what was written: then the shared one is."""
    whole = torch.randn(9, 9)
    stored_in(tmp_path / "shared", whole, [((0, 0), (4, 9)), ((4, 0), (5, 9))], step=3)
    shared, local = CheckpointStore(tmp_path / "shared").path(3), CheckpointStore(tmp_path / "local").path(3)
    local.mkdir(parents=True)
    store = CheckpointStore(tmp_path / "shared", local=tmp_path / "local")
    name = part_name(1, 2)
    (local / name).write_bytes((shared / name).read_bytes())

    def files() -> list[Path]:
        return [piece.file.parent for piece in store.open(3, every_byte=False).stored()["t"].pieces]

    assert files() == [shared, local], "where there is one"
    assert torch.equal(store.open(3).tensors()["t"], whole)
    flip(local / name, (local / name).stat().st_size - 1)
    assert files() == [shared, local]
    assert torch.equal(store.open(3).tensors()["t"], whole), "it has the right size, and yet is not taken"
    opened = store.open(3, every_byte=False).stored()["t"]
    (local / name).unlink()
    assert torch.equal(read_tensor(opened), whole), "gone since it was chosen"
    (local / name).write_bytes(b"half of it")
    assert files() == [shared, shared]


def test_where_both_copies_are_damaged_the_shared_one_is_named(tmp_path: Path) -> None:
    stored_in(tmp_path / "shared", torch.randn(9), [((0,), (9,))], step=3)
    store = CheckpointStore(tmp_path / "shared", local=tmp_path / "local")
    shared = store.path(3)
    local = tmp_path / "local" / shared.name
    local.mkdir(parents=True)
    opened = store.open(3)
    for folder in (local, shared):
        (folder / part_name(0, 1)).write_bytes((shared / part_name(0, 1)).read_bytes())
        flip(folder / part_name(0, 1), -1)
    with pytest.raises(DamagedCheckpoint, match=str(shared)):
        opened.tensors()


def test_two_tensors_are_equal_if_all_their_bytes_are(small_blocks: None, tmp_path: Path) -> None:
    whole = torch.randn(30, 5)
    whole[3, 3] = float("nan")
    a = stored_in(tmp_path / "a", whole, [((0, 0), (30, 5))])
    b = stored_in(tmp_path / "b", whole, [((0, 0), (17, 5)), ((17, 0), (13, 2)), ((17, 2), (13, 3))])
    assert same_bytes(a, b)
    whole[29, 4] += 1
    assert not same_bytes(a, stored_in(tmp_path / "c", whole, [((0, 0), (30, 5))]))
    assert not same_bytes(a, stored_in(tmp_path / "d", whole.double(), [((0, 0), (30, 5))]))


def test_while_many_tensors_are_read_each_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    whole = {f"t{n}": torch.randn(20, n + 1) for n in range(9)}
    store.save(1, whole, {})
    stored = store.open(1, every_byte=False).stored()
    opened: list[int] = []
    real = os.open

    def counted(file: Any, flags: int) -> int:
        opened.append(real(file, flags))
        return opened[-1]

    monkeypatch.setattr(reading.os, "open", counted)
    with files_kept_open(), files_kept_open():
        assert all(torch.equal(read_tensor(stored[name]), tensor) for name, tensor in whole.items())
    assert len(opened) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
    before = len(os.listdir("/proc/self/fd"))
    read_tensor(stored["t1"])
    assert len(os.listdir("/proc/self/fd")) == before, "nothing stays open"
