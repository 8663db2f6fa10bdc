"""All that is damaged is found, and it is said where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from saved_parts import save_in_parts

from gradus.checkpoint.commit import commit
from gradus.checkpoint.damage import damage
from gradus.checkpoint.digest import BLOCK_BYTES
from gradus.checkpoint.manifest import read_manifest
from gradus.checkpoint.part import lay_out, part_name, write_part, write_record
from gradus.checkpoint.writing import one_at_a_time

TENSORS = {"a": torch.arange(30.0).view(6, 5), "b": torch.arange(7), "c": torch.tensor(2.5), "none": torch.empty(0, 3)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_in_parts(tmp_path, 3, TENSORS, 2)


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_a_whole_checkpoint_has_none_and_every_byte_of_its_parts_is_read(path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    assert damage(path, lambda done, total: told.append((done, total))) == []
    parts = sum(file.stat().st_size for file in path.glob("part-*"))
    assert told[-1] == (parts, parts)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_every_flipped_byte_is_found_in_its_file(path: Path) -> None:
    for file in sorted(path.iterdir()):
        for position in range(0, file.stat().st_size, 7):
            flip(file, position)
            found = damage(path)
            assert len(found) == 1, (file, position)
            assert file.name in str(found[0]), (file, position)
            flip(file, position)
    assert damage(path) == []


def test_the_tensors_that_are_hit_are_named(path: Path) -> None:
    second = path / "part-00001-of-00002.safetensors"
    [piece] = [p for p in read_manifest(path)["tensors"]["b"]["pieces"] if p["file"] == second.name]
    flip(second, piece["start"])
    [found] = damage(path)
    assert (found.file, found.tensors) == (second.name, ("b",))
    assert str(found).endswith("not what was written (of b)")


def test_all_files_are_looked_at(path: Path) -> None:
    first, second = sorted(path.glob("part-*"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-4])
    missing, cut = damage(path)
    assert (missing.file, missing.what) == (first.name, "No such file or directory")
    assert set(missing.tensors) == {"a", "b", "c"}
    assert "bytes, and " in cut.what
    assert len(cut.tensors) == 1, "the last of the file"


def test_a_tensor_of_many_blocks_is_damaged_where_it_is(tmp_path: Path) -> None:
    large = torch.zeros(3 * BLOCK_BYTES // 4 + 5)
    path = save_in_parts(tmp_path, 1, {"large": large, "after": torch.ones(4)}, 1)
    [file] = path.glob("part-*")
    start = read_manifest(path)["tensors"]["large"]["pieces"][0]["start"]
    flip(file, start + BLOCK_BYTES + 11)
    [found] = damage(path)
    assert found.tensors == ("large",)
    assert found.what.startswith(f"bytes {start + BLOCK_BYTES} to {start + 2 * BLOCK_BYTES}")


def test_bytes_of_no_tensor_are_compared_too(tmp_path: Path) -> None:
    """Two ranks that wrote the same box: the first one's is used, and the second's lies there all the same."""
    numbers = torch.arange(4.0)
    for rank in (0, 1):
        layout = lay_out(part_name(rank, 2), [("same", "F32", (4,), (0,), (4,))])
        data = one_at_a_time(layout, lambda _: numbers)
        write_record(tmp_path, write_part(tmp_path, layout, data, abandoned=lambda: False))
    commit(tmp_path, 1, 2, {"state": {}}, abandoned=lambda: False)
    assert damage(tmp_path) == []
    second = tmp_path / part_name(1, 2)
    flip(second, second.stat().st_size - 1)
    [found] = damage(tmp_path)
    assert str(found) == f"{second.name}: bytes that belong to no tensor are not what was written"
