"""The store: a checkpoint exists when it is committed, is used only if every byte is as written, and runs nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gradus.checkpoint import store as store_module
from gradus.checkpoint.commit import NotWhole, commit, committed_text
from gradus.checkpoint.digest import file_digest
from gradus.checkpoint.manifest import COMMITTED, MANIFEST
from gradus.checkpoint.part import lay_out, part_name, write_part, write_record
from gradus.checkpoint.store import CheckpointStore, DamagedCheckpoint
from gradus.checkpoint.weights import open_weights
from gradus.checkpoint.writing import one_at_a_time
from gradus.schema.errors import InputError

PARTS = [part_name(0, 2), part_name(1, 2)]
FILES = [*PARTS, MANIFEST, COMMITTED]
STATE: dict[str, Any] = {"training": {"step": 10, "best": 1.5}, "optimizer": {}}


def tensors(value: float = 1.0) -> dict[str, Tensor]:
    return {"a": torch.arange(12.0).view(3, 4) + value, "b": torch.arange(5)}


def save_as_two(store: CheckpointStore, step: int, value: float) -> None:
    """A checkpoint as two ranks write it: two rows and one of `a`, and `b` on the first."""
    whole = tensors(value)
    rows = {0: (0, whole["a"][:2]), 1: (2, whole["a"][2:])}
    for rank, (first, part) in rows.items():
        boxes: list[Any] = [("a", "F32", (3, 4), (first, 0), tuple(part.shape))]
        held = {"a": part}
        if rank == 0:
            boxes.append(("b", "I64", (5,), (0,), (5,)))
            held["b"] = whole["b"]
        layout = lay_out(part_name(rank, 2), boxes)
        record = write_part(
            store.path(step), layout, one_at_a_time(layout, held.__getitem__), abandoned=lambda: False, save_id="1"
        )
        write_record(store.path(step), record)
    commit(store.path(step), step, 2, {"state": {**STATE, "step": step}}, abandoned=lambda: False, save_id="1")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def two(store: CheckpointStore) -> CheckpointStore:
    """Checkpoints of steps 10 and 20, each in two parts."""
    for step in (10, 20):
        save_as_two(store, step, float(step))
    return store


def loaded(store: CheckpointStore, step: int) -> dict[str, Tensor]:
    """As a run loads it: what is read is compared as it is read."""
    return store.open(step, every_byte=False).tensors()


def expect_damage(store: CheckpointStore, step: int, file: str) -> None:
    """Found before anything is used, and found while it is read; named; and the one before is taken."""
    for look in (store.open, lambda step: loaded(store, step)):
        with pytest.raises(DamagedCheckpoint, match=file) as caught:
            look(step)
        assert str(store.path(step)) in caught.value.message
    newest, damaged = store.newest()
    assert newest is not None
    assert newest.step == 10
    assert len(damaged) == 1


def test_tensors_and_state_come_back_as_they_were(store: CheckpointStore) -> None:
    saved = {
        "fp32": torch.randn(3, 4),
        "fp64": torch.randn(2, dtype=torch.float64),
        "bf16": torch.randn(7, dtype=torch.bfloat16),
        "fp16": torch.randn(7, dtype=torch.float16),
        "fp8": torch.randn(7).to(torch.float8_e4m3fn),
        "fp8 wide": torch.randn(3, 3).to(torch.float8_e5m2),
        "whole": torch.tensor([2**60, -1]),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
        "special": torch.tensor([float("nan"), float("inf"), -0.0]),
        "transposed": torch.randn(3, 5).t(),
        "one of a column": torch.randn(4, 3)[:1, 1],
        "channels_last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    store.save(7, saved, STATE)
    opened = store.open(7)
    assert (opened.step, opened.state) == (7, STATE)
    found = opened.tensors()
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def test_parts_of_several_ranks_are_whole_tensors_again(two: CheckpointStore) -> None:
    for found in (two.open(20).tensors(), loaded(two, 20)):
        assert found.keys() == {"a", "b"}
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors(20.0).items())


def test_any_safetensors_reader_opens_a_part(two: CheckpointStore) -> None:
    assert torch.equal(load_file(two.path(20) / PARTS[1])["a"], tensors(20.0)["a"][2:])


def test_tensors_that_share_memory_are_saved_each(store: CheckpointStore) -> None:
    whole = torch.randn(4, 6)
    saved = {"tied": whole, "tied again": whole, "rows": whole[1:3], "column": whole[:, 2], "parameter": whole.view(24)}
    store.save(1, saved, {})
    found = store.open(1).tensors()
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(found[name], tensor), name


def test_saving_leaves_what_is_saved_alone(store: CheckpointStore) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    store.save(1, {"p": parameter}, {})
    assert parameter.requires_grad
    parameter.data.fill_(5)
    assert torch.equal(store.open(1).tensors()["p"], torch.ones(3))


def test_what_no_checkpoint_can_hold_is_named_and_nothing_is_written(store: CheckpointStore) -> None:
    with pytest.raises(InputError, match=r"sparse is torch.float32 and torch.sparse_coo"):
        store.save(1, {"sparse": torch.eye(3).to_sparse()}, {})
    assert not store.path(1).exists()


def test_a_run_without_checkpoints_has_none(store: CheckpointStore) -> None:
    assert store.steps() == []
    assert store.newest() == (None, [])


def test_steps_are_in_order_of_number_also_beyond_eight_digits(store: CheckpointStore) -> None:
    for step in (5, 123_456_789, 99_999_999):
        store.save(step, tensors(), STATE)
    assert store.steps() == [5, 99_999_999, 123_456_789]
    newest, _ = store.newest()
    assert newest is not None
    assert newest.step == 123_456_789


def test_those_that_are_known_to_be_damaged_are_passed_over(two: CheckpointStore) -> None:
    newest, damaged = two.newest(every_byte=False, passed_over={20})
    assert newest is not None
    assert (newest.step, damaged) == (10, [])


def test_a_folder_without_committed_is_no_checkpoint(two: CheckpointStore) -> None:
    (two.path(20) / COMMITTED).unlink()
    assert two.steps() == [10]
    newest, damaged = two.newest()
    assert newest is not None
    assert (newest.step, damaged) == (10, [])


def test_the_same_step_can_be_saved_again_over_what_was_left_of_it(store: CheckpointStore) -> None:
    """By a world of another size, too: what its ranks left is not taken for this one's."""
    leftover = store.path(10)
    save_as_two(store, 10, 5.0)
    (leftover / COMMITTED).unlink()
    (leftover / (PARTS[1] + ".partial")).write_bytes(b"half of it")
    store.save(10, tensors(2.0), STATE)
    assert store.steps() == [10]
    assert sorted(path.name for path in leftover.iterdir()) == sorted([part_name(0, 1), MANIFEST, COMMITTED])
    assert torch.equal(store.open(10).tensors()["a"], tensors(2.0)["a"])


@pytest.mark.parametrize("file", FILES)
def test_a_flip_of_any_byte_of_any_file_is_found_and_named(two: CheckpointStore, file: str) -> None:
    path = two.path(20) / file
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = whole[place] ^ (1 << (place % 8))
        path.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        with pytest.raises(DamagedCheckpoint, match=file):
            loaded(two, 20)
    for place in {0, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :])
        expect_damage(two, 20, file)
    path.write_bytes(whole)
    assert two.open(20).step == 20


@pytest.mark.parametrize("keep", [0, 1, 0.5, -1])
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_was_cut_short_is_found_and_named(two: CheckpointStore, file: str, keep: float) -> None:
    path = two.path(20) / file
    size = path.stat().st_size
    os.truncate(path, size - 1 if keep == -1 else int(size * keep) if keep == 0.5 else int(keep))
    expect_damage(two, 20, file)


@pytest.mark.parametrize("file", FILES)
def test_a_file_with_more_in_it_is_found_and_named(two: CheckpointStore, file: str) -> None:
    with (two.path(20) / file).open("ab") as stream:
        stream.write(b" ")
    expect_damage(two, 20, file)


@pytest.mark.parametrize("file", [*PARTS, MANIFEST])
def test_a_file_that_is_gone_is_named(two: CheckpointStore, file: str) -> None:
    (two.path(20) / file).unlink()
    expect_damage(two, 20, file)


def test_two_parts_that_were_swapped_are_found(store: CheckpointStore) -> None:
    """Also where they are of one size and have the same header."""
    for step in (10, 20):
        save_as_two(store, step, float(step))
    for first, second in ((PARTS[0], PARTS[1]), (store.path(10) / PARTS[1], store.path(20) / PARTS[1])):
        one, other = store.path(20) / first, store.path(20) / second
        contents = one.read_bytes(), other.read_bytes()
        one.write_bytes(contents[1])
        other.write_bytes(contents[0])
        with pytest.raises(DamagedCheckpoint, match="part-"):
            store.open(20)
        with pytest.raises(DamagedCheckpoint, match="part-"):
            loaded(store, 20)
        one.write_bytes(contents[0])
        other.write_bytes(contents[1])


def test_a_manifest_of_another_step_is_found(two: CheckpointStore) -> None:
    shutil.copy(two.path(10) / MANIFEST, two.path(20) / MANIFEST)
    expect_damage(two, 20, MANIFEST)
    shutil.copy(two.path(10) / COMMITTED, two.path(20) / COMMITTED)
    with pytest.raises(DamagedCheckpoint, match="is of step 10, and the folder's name says 20"):
        two.open(20, every_byte=False)


def test_when_every_checkpoint_is_damaged_there_is_none_and_each_is_reported(two: CheckpointStore) -> None:
    for step in (10, 20):
        (two.path(step) / PARTS[0]).write_bytes(b"")
    newest, damaged = two.newest()
    assert newest is None
    assert len(damaged) == 2


def test_damage_beside_what_is_read_is_left_to_those_who_read_it(two: CheckpointStore) -> None:
    """Nobody reads all of a large checkpoint: each rank compares the blocks that it needs."""
    file = two.path(20) / PARTS[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of `a`, behind the wider type
    file.write_bytes(content)
    opened = two.open(20, every_byte=False)
    assert opened.stored()["b"].pieces[0].file == file
    with pytest.raises(DamagedCheckpoint, match=r"bytes \d+ to \d+, of a, have the digest"):
        opened.tensors()


def rewrite_manifest(path: Path, change: Any) -> None:
    """A manifest that somebody changed, and made COMMITTED fit."""
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))
    (path / COMMITTED).write_bytes(committed_text((path / MANIFEST).read_bytes()))


def set_in(*keys: Any, value: Any) -> Any:
    def change(manifest: Any) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value

    return change


PIECE = ("tensors", "a", "pieces", 0)


@pytest.mark.parametrize(
    "change",
    [
        set_in("tensors", value=[]),
        set_in("files", value=None),
        set_in("state", value=3),
        set_in("tensors", "a", value=7),
        set_in("tensors", "a", "dtype", value=["F32"]),
        set_in("tensors", "a", "dtype", value="F13"),
        set_in("tensors", "a", "shape", value=[4, 4]),
        set_in("tensors", "a", "shape", value=[3.0, 4]),
        set_in("tensors", "a", "pieces", value=[]),
        set_in("tensors", "a", "pieces", value=None),
        set_in(*PIECE, "offset", value=[1, 0]),
        set_in(*PIECE, "offset", value=[-1, 0]),
        set_in(*PIECE, "shape", value=[2]),
        set_in(*PIECE, "start", value=0),
        set_in(*PIECE, "start", value=10**9),
        set_in(*PIECE, "bytes", value=31),
        set_in(*PIECE, "digests", value=[]),
        set_in(*PIECE, "digests", value=None),
        set_in(*PIECE, "digests", value=[7]),
        set_in(*PIECE, "file", value="../elsewhere"),
        set_in("files", "../../secret", value={"bytes": 1, "xxh3_64": "0", "header": {"bytes": 1, "xxh3_64": "0"}}),
        set_in("files", PARTS[0], value={}),
        set_in("files", PARTS[0], "header", value={}),
        set_in("step", value=11),
    ],
)
def test_a_manifest_that_does_not_add_up_is_refused_even_if_its_digest_fits(two: CheckpointStore, change: Any) -> None:
    rewrite_manifest(two.path(20), change)
    with pytest.raises(DamagedCheckpoint):
        loaded(two, 20)
    assert two.newest()[0] is not None


def test_a_checkpoint_of_an_earlier_format_is_refused_and_says_what_to_do(two: CheckpointStore) -> None:
    path = two.path(20)
    shutil.rmtree(path)
    path.mkdir()
    content = json.dumps({"format": 2, "step": 20, "files": {}, "state": {}}, indent=1).encode()
    (path / MANIFEST).write_bytes(content)
    (path / COMMITTED).write_text(json.dumps({"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}))
    (path / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="format 2, this version reads 3") as caught:
        two.newest()  # and no older one is taken in its place
    assert "checkpoint export" in str(caught.value.hint)
    with pytest.raises(InputError, match="format 2, this version reads 3") as caught:
        open_weights(path)
    assert "checkpoint export" in str(caught.value.hint)
    (path / MANIFEST).write_bytes(content[:-1])
    with pytest.raises(DamagedCheckpoint):
        two.open(20)


def test_a_checkpoint_of_a_later_format_is_refused(two: CheckpointStore) -> None:
    rewrite_manifest(two.path(20), set_in("format", value=4))
    with pytest.raises(InputError, match="format 4, this version reads 3"):
        two.newest()


def test_a_disk_that_is_full_is_an_os_error_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """Run where files may not grow beyond a limit."""
    script = f"""
import resource, signal, torch
from pathlib import Path
from gradus.checkpoint.store import CheckpointStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = CheckpointStore(Path({str(tmp_path)!r}))
store.save(1, {{"w": torch.ones(10)}}, {{}})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.save(2, {{"w": torch.ones(1_000_000)}}, {{}})
except OSError as error:
    print("refused", store.steps(), store.path(2).exists())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[0] == "refused [1] False", done.stderr


def test_a_save_that_does_not_verify_is_an_os_error_and_leaves_nothing(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*arguments: Any, **keywords: Any) -> None:
        raise NotWhole("something is missing")

    monkeypatch.setattr(store_module, "commit", damaged)
    with pytest.raises(OSError, match="something is missing"):
        store.save(1, tensors(), STATE)
    assert not store.path(1).exists()


def test_the_manifest_says_what_is_in_a_checkpoint(two: CheckpointStore) -> None:
    manifest = two.open(20).manifest
    assert (manifest["format"], manifest["step"]) == (3, 20)
    assert manifest["versions"].keys() == {"gradus", "torch", "python"}
    assert manifest["versions"]["torch"] == torch.__version__
    for name in PARTS:
        described = manifest["files"][name]
        assert file_digest(two.path(20) / name) == {key: described[key] for key in ("bytes", "xxh3_64")}
    assert sorted(path.name for path in two.path(20).iterdir()) == sorted(FILES)


def test_weights_of_a_model_are_found_in_several_parts(store: CheckpointStore) -> None:
    """As `model.weights` names them: by the checkpoint, by one of its files, or by the run."""
    run = store.folder.parent
    (run / "attempts").mkdir()
    whole = {"model.w": torch.randn(3, 4), "model.b": torch.randn(5), "optimizer.w.exp_avg": torch.randn(3, 4)}
    halves = [("model.w", "optimizer.w.exp_avg"), ("model.b",)]
    path = store.path(30)
    for rank, names in enumerate(halves):
        boxes = [(n, "F32", whole[n].shape, (0,) * whole[n].dim(), whole[n].shape) for n in names]
        layout = lay_out(part_name(rank, 2), boxes)
        data = one_at_a_time(layout, whole.__getitem__)
        write_record(path, write_part(path, layout, data, abandoned=lambda: False))
    commit(path, 30, 2, {"state": {}}, abandoned=lambda: False)
    for named in (path, path / PARTS[1], run):
        found = open_weights(named).tensors
        assert {name: stored.shape for name, stored in found.items()} == {"w": (3, 4), "b": (5,)}
    (path / COMMITTED).unlink()
    for named in (path, path / PARTS[1]):  # of which half might be taken for all
        with pytest.raises(InputError, match="COMMITTED"):
            open_weights(named)


class Canary:
    """Sings, by making a file, if anybody unpickles it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_the_canary_sings_when_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Canary(tmp_path / "sang")))
    assert (tmp_path / "sang").exists()


@pytest.mark.parametrize("form", ["pickle", "torch"])
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("digests_agree", [False, True])
def test_nothing_in_a_checkpoint_ever_runs(
    two: CheckpointStore, tmp_path: Path, file: str, form: str, digests_agree: bool
) -> None:
    """Not even if somebody made digests fit."""
    song = tmp_path / "sang"
    path = two.path(20)
    if form == "pickle":
        (path / file).write_bytes(pickle.dumps(Canary(song)))
    else:
        torch.save(Canary(song), path / file)
    if digests_agree:
        if file in PARTS:
            fits = file_digest(path / file)
            rewrite_manifest(path, set_in("files", file, value={**fits, "header": fits}))
        elif file == MANIFEST:
            (path / COMMITTED).write_bytes(committed_text((path / MANIFEST).read_bytes()))
    with pytest.raises(DamagedCheckpoint):
        two.open(20).tensors()
    with pytest.raises(DamagedCheckpoint):
        loaded(two, 20)
    two.newest()
    assert not song.exists()
