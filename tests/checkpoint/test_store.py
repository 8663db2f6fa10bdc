"""The store: a checkpoint exists when it is committed, is used only if every byte is as written, and runs nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradus.checkpoint import manifest as manifest_module
from gradus.checkpoint import store as store_module
from gradus.checkpoint.store import COMMITTED, MANIFEST, TENSORS, CheckpointStore, DamagedCheckpoint
from gradus.schema.errors import InputError

FILES = [TENSORS, MANIFEST, COMMITTED]
STATE: dict[str, Any] = {"training": {"step": 10, "best": 1.5}, "optimizer": {}}


def tensors(value: float = 1.0) -> dict[str, Tensor]:
    return {"a": torch.full((3, 4), value), "b": torch.arange(5)}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def two(store: CheckpointStore) -> CheckpointStore:
    for step in (10, 20):
        store.save(step, tensors(float(step)), {**STATE, "step": step})
    return store


def test_tensors_and_state_come_back_as_they_were(store: CheckpointStore) -> None:
    saved = {
        "fp32": torch.randn(3, 4),
        "fp64": torch.randn(2, dtype=torch.float64),
        "bf16": torch.randn(7, dtype=torch.bfloat16),
        "fp16": torch.randn(7, dtype=torch.float16),
        "whole": torch.tensor([2**60, -1]),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
        "special": torch.tensor([float("nan"), float("inf"), -0.0]),
        "transposed": torch.randn(3, 5).t(),
        "channels_last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    }
    store.save(7, saved, STATE)
    opened = store.open(7)
    assert (opened.step, opened.state) == (7, STATE)
    found = opened.tensors()
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].nan_to_num(), tensor.nan_to_num()), name


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


def test_a_run_without_checkpoints_has_none(store: CheckpointStore) -> None:
    assert store.steps() == []
    assert store.newest() == (None, [])
    store.prune(0, keep=1)


def test_steps_are_in_order_of_number_also_beyond_eight_digits(store: CheckpointStore) -> None:
    for step in (5, 123_456_789, 99_999_999):
        store.save(step, tensors(), STATE)
    assert store.steps() == [5, 99_999_999, 123_456_789]
    newest, _ = store.newest()
    assert newest is not None
    assert newest.step == 123_456_789


def test_committed_is_written_when_everything_else_is_on_the_disk(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is flushed, in order, and whether the checkpoint counted as committed then."""
    flushed: list[tuple[str, bool]] = []
    flush = store_module._flush

    def watched(path: Path) -> None:
        flush(path)
        flushed.append((path.name, (store.path(3) / COMMITTED).exists()))

    monkeypatch.setattr(store_module, "_flush", watched)
    store.save(3, tensors(), STATE)
    before = {name for name, committed in flushed if not committed}
    after = {name for name, committed in flushed if committed}
    assert {TENSORS, MANIFEST, "step-00000003"} <= before
    assert {COMMITTED, "step-00000003", "checkpoints"} <= after


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(7))
def test_a_save_that_is_killed_at_any_moment_leaves_the_one_before(
    two: CheckpointStore, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Each moment is one more file written or flushed; only after the last is the new checkpoint there."""
    done = 0

    def dying(original: Any) -> Any:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            nonlocal done
            if done == moment:
                raise Killed
            done += 1
            return original(*arguments, **keywords)

        return wrapped

    monkeypatch.setattr(store_module, "write_tensors", dying(store_module.write_tensors))
    monkeypatch.setattr(store_module, "_flush", dying(store_module._flush))
    monkeypatch.setattr(Path, "write_text", dying(Path.write_text))
    with pytest.raises(Killed):
        two.save(30, tensors(), STATE)
    monkeypatch.undo()
    newest, damaged = two.newest()
    assert newest is not None
    assert damaged == []
    committed = (two.path(30) / COMMITTED).exists()
    assert newest.step == (30 if committed else 20)
    assert committed == (moment >= 6), "written are tensors and manifest; flushed are both and the folder"
    two.save(30, tensors(3.0), STATE)  # a later attempt comes by again
    assert two.open(30).tensors()["a"][0, 0] == 3.0


def test_a_folder_without_committed_is_no_checkpoint(two: CheckpointStore) -> None:
    (two.path(20) / COMMITTED).unlink()
    assert two.steps() == [10]
    newest, damaged = two.newest()
    assert newest is not None
    assert (newest.step, damaged) == (10, [])


def test_the_same_step_can_be_saved_again_over_what_was_left_of_it(store: CheckpointStore) -> None:
    leftover = store.path(10)
    leftover.mkdir(parents=True)
    (leftover / TENSORS).write_bytes(b"half of it")
    (leftover / "something else").mkdir()
    store.save(10, tensors(), STATE)
    assert store.steps() == [10]
    assert sorted(path.name for path in leftover.iterdir()) == sorted(FILES)
    store.save(10, tensors(2.0), STATE)
    assert store.open(10).tensors()["a"][0, 0] == 2.0


def flips(size: int) -> list[int]:
    """Places to damage: the ends, and some in between."""
    return sorted({0, 1, size // 3, size // 2, size - 2, size - 1})


@pytest.mark.parametrize("file", FILES)
def test_a_single_flipped_byte_is_found_named_and_the_checkpoint_before_is_taken(
    two: CheckpointStore, file: str
) -> None:
    path = two.path(20) / file
    whole = path.read_bytes()
    for place in flips(len(whole)):
        for bit in (0x01, 0x80):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(DamagedCheckpoint, match=file):
                two.open(20)
            newest, damaged = two.newest()
            assert newest is not None
            assert newest.step == 10
            assert newest.tensors()["a"][0, 0] == 10.0
            assert len(damaged) == 1
            assert str(two.path(20)) in damaged[0].message
    path.write_bytes(whole)
    assert two.open(20).step == 20


@pytest.mark.parametrize("keep", [0, 1, 0.5, -1])
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_was_cut_short_is_found_and_named(two: CheckpointStore, file: str, keep: float) -> None:
    path = two.path(20) / file
    size = path.stat().st_size
    os.truncate(path, size - 1 if keep == -1 else int(size * keep) if keep == 0.5 else int(keep))
    with pytest.raises(DamagedCheckpoint, match=file):
        two.open(20)
    newest, _ = two.newest()
    assert newest is not None
    assert newest.step == 10


@pytest.mark.parametrize("file", [TENSORS, MANIFEST])
def test_a_file_that_is_gone_is_named(two: CheckpointStore, file: str) -> None:
    (two.path(20) / file).unlink()
    with pytest.raises(DamagedCheckpoint, match=file):
        two.open(20)
    newest, damaged = two.newest()
    assert newest is not None
    assert (newest.step, len(damaged)) == (10, 1)


def test_when_every_checkpoint_is_damaged_there_is_none_and_each_is_reported(two: CheckpointStore) -> None:
    for step in (10, 20):
        (two.path(step) / TENSORS).write_bytes(b"")
    newest, damaged = two.newest()
    assert newest is None
    assert len(damaged) == 2


def test_a_checkpoint_of_another_format_is_refused(two: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "FORMAT", 3)
    with pytest.raises(InputError, match="format 2, this version reads 3") as caught:
        two.newest()  # and no older one is taken in its place
    assert "checkpoint export" in str(caught.value.hint)


def test_prune_keeps_the_newest_and_the_best(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4, 5):
        store.save(step, tensors(), STATE)
    store.prune(5, keep=2, also_keep=2)
    assert store.steps() == [2, 4, 5]
    store.prune(5, keep=2, also_keep=99)
    assert store.steps() == [4, 5]
    store.prune(5, keep=7)
    assert store.steps() == [4, 5]
    store.prune(5, keep=1)
    assert store.steps() == [5]
    assert not store.path(4).exists()


def test_prune_never_keeps_a_damaged_one_in_place_of_a_good_one(store: CheckpointStore) -> None:
    """10 was found damaged and passed over: the run went on from 5, and 6 is the newest that can be trusted."""
    for step in (5, 10, 6):
        store.save(step, tensors(), STATE)
    (store.path(10) / TENSORS).write_bytes(b"damaged")
    store.prune(6, keep=1)
    assert store.steps() == [6]
    newest, damaged = store.newest()
    assert newest is not None
    assert (newest.step, damaged) == (6, [])


def test_a_disk_that_is_full_is_an_os_error_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """Run where files may not grow beyond a limit: safetensors has an error class of its own for that."""
    script = f"""
import resource, torch
from pathlib import Path
from gradus.checkpoint.store import CheckpointStore
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


def test_a_checkpoint_that_is_half_deleted_does_not_count(
    two: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> None:
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(Killed):
        two.prune(20, keep=1)
    assert two.steps() == [20]


def test_the_manifest_lists_size_and_checksum_of_the_tensors(two: CheckpointStore) -> None:
    manifest = json.loads((two.path(20) / MANIFEST).read_text())
    assert manifest["step"] == 20
    assert manifest["files"][TENSORS]["bytes"] == (two.path(20) / TENSORS).stat().st_size
    assert sorted(path.name for path in two.path(20).iterdir()) == sorted(FILES)


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
@pytest.mark.parametrize("checksums_agree", [False, True])
def test_nothing_in_a_checkpoint_ever_runs(
    two: CheckpointStore, tmp_path: Path, file: str, form: str, checksums_agree: bool
) -> None:
    """Not even if somebody made checksums fit."""
    song = tmp_path / "sang"
    path = two.path(20)
    if form == "pickle":
        (path / file).write_bytes(pickle.dumps(Canary(song)))
    else:
        torch.save(Canary(song), path / file)
    if checksums_agree:
        if file == TENSORS:
            manifest = json.loads((path / MANIFEST).read_text())
            manifest["files"][TENSORS] = manifest_module.fingerprint(path / TENSORS)
            (path / MANIFEST).write_text(json.dumps(manifest))
        if file != COMMITTED:
            (path / COMMITTED).write_text(json.dumps(manifest_module.fingerprint(path / MANIFEST)))
    with pytest.raises(DamagedCheckpoint):
        two.open(20).tensors()
    two.newest()
    assert not song.exists()
