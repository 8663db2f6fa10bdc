"""Verification: no byte can change without being found and named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradus.data.shards.origins import ImageFolders
from gradus.data.shards.packing import HowToPack, pack
from gradus.data.shards.reading import Shards
from gradus.data.shards.verify import verify
from gradus.schema.errors import GradusError


@pytest.fixture(scope="module")
def packed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified") / "d"
    pack(ImageFolders(images), folder, HowToPack(2**16), workers=1)
    return folder


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))


def test_whole_data_has_no_damage(packed: Path) -> None:
    for workers in (1, 2):
        found = verify(str(packed), workers)
        assert (found.samples, found.damage) == (61, ())
        assert found.bytes == sum(file.stat().st_size for file in packed.glob("*.tar"))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_is_found_in_its_shard(packed: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(packed.glob("*.tar"))))
    at = data.draw(st.integers(0, file.stat().st_size - 1))
    flip(file, at)
    try:
        damage = verify(str(packed), 1).damage
    finally:
        flip(file, at)
    assert [each.shard for each in damage] == [file.name]


@pytest.mark.parametrize("part", [0, 1])
def test_damage_is_named_with_shard_sample_and_part(packed: Path, tmp_path: Path, part: int) -> None:
    folder = tmp_path / "d"
    shutil.copytree(packed, folder)
    shards = Shards(str(folder))
    places = shards.index.places(np.array([30]), part)
    file = folder / shards.description.shards[places.shards[0]].file
    flip(file, places.offsets[0])
    flip(file, places.offsets[0] - 400)  # in its header
    (damage,) = verify(str(folder), 1).damage
    name = ("image", "label")[part]
    assert damage.document() == {
        "shard": file.name,
        "what": "its bytes are not those that were packed",
        "sample": "bee/img_09",
        "number": 30,
        "part": name,
    }
    assert str(damage).startswith(f"{file.name}, sample 'bee/img_09' (number 30), part '{name}': its bytes")
    flip(file, places.offsets[0])
    written = "its header or the padding is not as it was written"
    assert [(d.sample, d.part, d.what) for d in verify(str(folder), 1).damage] == [("bee/img_09", name, written)]
    flip(file, places.offsets[0] - 400)
    flip(file, places.offsets[0] + places.lengths[0])  # the first byte after it
    assert [(d.sample, d.part, d.what) for d in verify(str(folder), 1).damage] == [("bee/img_09", name, written)]


def test_what_is_missing_is_damage(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    shutil.copytree(packed, folder)
    first, second, third = sorted(folder.glob("*.tar"))[:3]
    first.unlink()
    second.write_bytes(second.read_bytes()[:-9000])
    third.write_bytes(third.read_bytes() + b"more")
    damage = verify(str(folder), 1).damage
    assert damage[0].shard == first.name
    assert "does not exist" in damage[0].what
    cut = [each for each in damage if each.shard == second.name]
    assert "bytes, packed were" in cut[0].what
    assert {each.what for each in cut[1:]} == {"its bytes are missing"}
    assert all(each.sample for each in cut[1:])
    assert [each.what.partition(" bytes")[2] for each in damage if each.shard == third.name] == [
        f", packed were {third.stat().st_size - 4}"
    ]


def test_two_shards_that_were_swapped_are_both_damaged(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    shutil.copytree(packed, folder)
    first, second = sorted(folder.glob("*.tar"))[:2]
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)
    assert {each.shard for each in verify(str(folder), 2).damage} == {first.name, second.name}


def test_with_a_damaged_index_nothing_can_be_said(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    shutil.copytree(packed, folder)
    flip(folder / "index", (folder / "index").stat().st_size - 300)
    with pytest.raises(GradusError, match="index is not as it was written"):
        verify(str(folder), 1)
