"""Patience: what cannot be read for a moment is no damage, and a run never goes back to an older step for it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gradus.checkpoint import patience
from gradus.checkpoint.manifest import DamagedCheckpoint
from gradus.checkpoint.part import part_name
from gradus.checkpoint.patience import UnreadableCheckpoint
from gradus.checkpoint.reading import files_kept_open, read_tensor
from gradus.checkpoint.store import CheckpointStore
from gradus.checkpoint.tensor_file import read_header
from gradus.schema.errors import EXIT_FAILED, InputError

PART = part_name(0, 1)
PASSING = [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOMEM, errno.ETIMEDOUT]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    monkeypatch.setattr(patience, "DELAYS", (0.0, 0.0))
    store = CheckpointStore(tmp_path)
    for step in (10, 20):
        store.save(step, {"w": torch.full((3,), float(step))}, {})
    return store


class Failing:
    """A call that fails so many times for a path, and then no more."""

    def __init__(self, real: Any, name: str, number: int, times: int) -> None:
        self.real, self.name, self.number, self.left = real, name, number, times

    def __get__(self, path: Path | None, _: object = None) -> Any:
        return lambda *arguments, **keywords: self(path, *arguments, **keywords)

    def __call__(self, path: Any, *arguments: Any, **keywords: Any) -> Any:
        there = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
        if there.endswith(self.name) and self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number), there)
        return self.real(path, *arguments, **keywords)


def fail(monkeypatch: pytest.MonkeyPatch, where: Any, call: str, name: str, number: int, times: int) -> Failing:
    failing = Failing(getattr(where, call), name, number, times)
    monkeypatch.setattr(where, call, failing)
    return failing


CALLS = [
    (Path, "iterdir", ""),
    (os, "stat", "step-00000020/COMMITTED"),
    (Path, "read_bytes", "step-00000020/COMMITTED"),
    (Path, "read_bytes", "step-00000020/MANIFEST.json"),
    (Path, "open", f"step-00000020/{PART}"),
]


@pytest.mark.parametrize("number", PASSING, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize(("where", "call", "name"), CALLS, ids=[f"{call} {name}" for _, call, name in CALLS])
def test_what_passes_is_waited_for_and_what_does_not_is_no_damage(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, where: Any, call: str, name: str, number: int
) -> None:
    name = name or str(store.folder)
    with monkeypatch.context() as once:
        failing = fail(once, where, call, name, number, 2)
        newest, damaged = store.newest()
        assert failing.left == 0
    assert newest is not None
    assert (newest.step, damaged) == (20, [])
    with monkeypatch.context() as for_long:
        fail(for_long, where, call, name, number, 1000)
        with pytest.raises(UnreadableCheckpoint, match=os.strerror(number)) as error:
            store.newest()
    assert name in error.value.message
    assert "--resume" in (error.value.hint or "")
    assert error.value.exit_code == EXIT_FAILED


@pytest.mark.parametrize("missing", ["MANIFEST.json", PART])
def test_what_is_not_there_is_damage_at_once(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(patience, "DELAYS", (1000.0,))
    (store.path(20) / missing).unlink()
    newest, (damage,) = store.newest()
    assert newest is not None
    assert newest.step == 10
    assert missing in damage.message
    (store.path(10) / missing).unlink()
    (store.path(10) / missing).mkdir()
    assert store.newest()[0] is None


@pytest.mark.parametrize("kept_open", [True, False])
def test_bytes_of_tensors_are_waited_for_too(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, kept_open: bool
) -> None:
    stored = store.open(20).stored()["w"]
    opened = []
    real = os.open

    def counted(*arguments: Any) -> int:
        opened.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(os, "open", counted)

    def read() -> list[float]:
        if not kept_open:
            return read_tensor(stored).tolist()
        with files_kept_open():
            return read_tensor(stored).tolist()

    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as once:
        fail(once, os, "preadv", PART, errno.ESTALE, 2)
        assert read() == [20.0] * 3
    assert len(opened) == 3, "a server that has forgotten an open file gives it out anew"
    with monkeypatch.context() as for_long:
        fail(for_long, os, "preadv", PART, errno.EIO, 1000)
        with pytest.raises(UnreadableCheckpoint, match="Input/output error"):
            read()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    (store.path(20) / PART).unlink()
    with pytest.raises(DamagedCheckpoint, match=PART):
        read()


def test_a_copy_on_the_nodes_disk_is_not_waited_for(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "node" / "step-00000020"
    local.mkdir(parents=True)
    (local / PART).write_bytes((store.path(20) / PART).read_bytes())
    stored = CheckpointStore(store.folder, tmp_path / "node").open(20).stored()["w"]
    assert stored.pieces[0].file == local / PART
    monkeypatch.setattr(patience, "DELAYS", (1000.0,))
    fail(monkeypatch, os, "preadv", f"node/step-00000020/{PART}", errno.EIO, 1000)
    assert read_tensor(stored).tolist() == [20.0] * 3


def test_a_file_of_the_user_s_own_is_theirs_to_see_to(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = read_header(store.path(20) / PART, "model.weights").tensors["w"]
    monkeypatch.setattr(patience, "DELAYS", (1000.0,))
    fail(monkeypatch, os, "preadv", PART, errno.EIO, 1)
    with pytest.raises(InputError, match="Input/output error"):
        read_tensor(stored)
