"""Headers are those of GNU tar, and say nothing about when or by whom they were written."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from gradus.data.shards.tar import Member, ShardWriter, header, sample_bytes


@pytest.mark.parametrize("name", ["a.jpg", "träin/class/0001.cls", "n" * 100, "long/" + "n" * 200 + ".jpg"])
@pytest.mark.parametrize("size", [0, 1, 511, 123_456, 8**11 - 1, 8**11])
def test_a_header_is_what_pythons_tarfile_writes(name: str, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.mode, info.size = 0o444, size
    assert header(name, size) == info.tobuf(tarfile.GNU_FORMAT)


def test_a_shard_holds_its_members_where_it_says(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.tar")
    members = [Member("jpg", b"j" * 700), Member("cls", b"7"), Member("txt", b"")]
    before = writer.bytes
    offsets = writer.add("k" * 120, members)
    assert writer.bytes - before == sample_bytes("k" * 120, members)
    shard = writer.close()
    content = (tmp_path / "a.tar").read_bytes()
    assert (shard.bytes, shard.samples) == (len(content), 1)
    assert [content[at : at + len(m.data)] for at, m in zip(offsets, members, strict=True)] == [m.data for m in members]
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert [entry.name for entry in archive] == [f"{'k' * 120}.{m.suffix}" for m in members]
        assert {(entry.mtime, entry.uid, entry.gid, entry.uname) for entry in archive} == {(0, 0, 0, "")}


def test_an_abandoned_shard_leaves_nothing(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.tar")
    writer.add("k", [Member("bin", b"x")])
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
