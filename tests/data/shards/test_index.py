"""The index: what was added is found again, and its size does not matter for opening it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from gradus.data.shards.columns import ALIGNED, MAGIC, Column, Columns, write_columns
from gradus.data.shards.index import Entry, Fragment, Index, merged_parts, write_index
from gradus.data.shards.tar import Shard
from gradus.schema.errors import GradusError


def test_columns_come_back_as_they_were_also_in_another_process(tmp_path: Path) -> None:
    table, empty = np.arange(12, dtype=np.uint64).reshape(4, 3), np.empty((0, 3), np.uint8)
    chunks = Column("<i8", (5,), iter([np.arange(2), np.arange(2, 5)]))
    columns = {"table": Column.of(table), "empty": Column.of(empty), "chunks": chunks}
    written = write_columns(tmp_path / "c", columns, {"said": "this"})
    assert written.bytes == (tmp_path / "c").stat().st_size
    found = pickle.loads(pickle.dumps(Columns(tmp_path / "c")))
    assert found.about == {"said": "this"}
    assert np.array_equal(found["table"], table)
    assert found["empty"].shape == (0, 3)
    assert found["chunks"].tolist() == [0, 1, 2, 3, 4]
    assert list(tmp_path.iterdir()) == [tmp_path / "c"]


def test_columns_that_are_not_as_long_as_announced_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="announced 40"):
        write_columns(tmp_path / "c", {"short": Column("<i8", (5,), iter([np.arange(2)]))}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 3, 20, 100])
def test_a_truncated_or_foreign_file_is_refused(tmp_path: Path, keep: int) -> None:
    write_columns(tmp_path / "c", {"a": Column.of(np.arange(100))}, {})
    (tmp_path / "c").write_bytes((tmp_path / "c").read_bytes()[:keep])
    with pytest.raises(GradusError, match="no whole index"):
        Columns(tmp_path / "c")
    (tmp_path / "c").write_bytes(b"something else" * 100)
    with pytest.raises(GradusError, match="no whole index"):
        Columns(tmp_path / "c")


def test_fragments_that_know_different_parts_become_one_index(tmp_path: Path) -> None:
    first, second = Fragment(), Fragment()
    first.add("a", {"image": Entry("jpg", 512, 10, 2**64 - 1), "label": Entry("cls", 1536, 1, 5)}, 2, 0, 0)
    first.add("bb", {"image": Entry("png", 2560, 2**33, 6)}, None, 0, 0)
    second.add("ccc", {"text": Entry("txt", 512, 7, 8), "image": Entry("png", 2048, 3, 9)}, 0, 7, 4)
    second.add("d", {"text": Entry("txt", 3000, 1, 1)}, 0, 1, 3)
    first.write(tmp_path / "0", [Shard("x", 1, "", 1), Shard("y", 1, "", 1)], {"split": "train"})
    second.write(tmp_path / "1", [Shard("z", 1, "", 2)], {"split": "train"})
    files = [tmp_path / "0", tmp_path / "1"]
    parts = merged_parts([Columns(file).about for file in files])
    assert parts == {"image": ["jpg", "png"], "label": ["cls"], "text": ["txt"]}
    write_index(tmp_path / "index", files, parts)
    index = Index(tmp_path / "index")
    assert index.offsets.tolist() == [[512, 1536, 0], [2560, 0, 0], [2048, 0, 512], [0, 0, 3000]]
    assert index.lengths.dtype == np.uint64  # a part of 8 GiB
    assert index.offsets.dtype == np.uint32
    assert index.checksums[0].tolist() == [2**64 - 1, 5, 0]
    assert index.suffixes[:, 0].tolist() == [0, 1, 1, 0]
    assert [index.key(number) for number in range(4)] == ["a", "bb", "ccc", "d"]
    assert index.labels is not None
    assert index.labels.tolist() == [2, -1, 0, 0]
    assert index.tokens is not None
    assert index.tokens.tolist() == [0, 0, 0, 4, 7]
    places = index.places(np.array([3, 2, 1]), 2)
    assert (places.shards, places.offsets, places.lengths) == ([2, 2, 1], [3000, 512, 0], [1, 7, 0])
    assert [index.samples_of(shard) for shard in range(3)] == [(0, 1), (1, 2), (2, 4)]


def bytes_read() -> int:
    """By this process, since it began, with calls to the system."""
    return int(Path("/proc/self/io").read_text().split()[1])


def bytes_mapped(file: Path) -> int:
    """Of a file that is mapped: those that somebody has looked at, with the rest of their pages."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and first == "Rss:":
            found += int(rest[0]) * 1024
    return found


def test_an_index_of_a_hundred_million_samples_opens_at_once(tmp_path: Path) -> None:
    count = 100_000_000
    shapes = {"shards": ("<i8", (2,)), "key_ends": ("<u4", (count,)), "keys": ("|u1", (count,))}
    shapes |= dict.fromkeys(("offsets", "lengths"), ("<u4", (count, 2)))
    shapes |= {"checksums": ("<u8", (count, 2)), "suffixes": ("|u1", (count, 2)), "labels": ("<i8", (count,))}
    at, columns = 0, {}
    for name, (dtype, shape) in shapes.items():
        columns[name] = {"dtype": dtype, "shape": list(shape), "at": at}
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        at += size + -size % ALIGNED
    header = json.dumps({"columns": columns, "about": {}}).encode()
    with (tmp_path / "index").open("wb") as stream:  # all of it zeros, which take no room on the disk
        stream.write(MAGIC + len(header).to_bytes(8, "little") + header)
        stream.truncate(16 + len(header) + at)
    before = bytes_read()
    index = Index(tmp_path / "index")
    assert index.length == count
    assert bytes_read() - before < 2**20  # of 3.9 GB: a look at each sample would read a whole column
    assert bytes_mapped(tmp_path / "index") < 2**20
    places = index.places(np.random.default_rng(0).integers(0, count, 256), 1)
    assert places.offsets == [0] * 256
    assert 0 < bytes_mapped(tmp_path / "index") < 2**28, "what was asked for is looked at, and its neighbours"
