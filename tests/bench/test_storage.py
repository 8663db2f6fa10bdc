"""Storage is read from the disk and not from memory, and what is advised follows from the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradus.bench.interleaved import Spread
from gradus.bench.reading import (
    drop,
    file_system,
    held_share,
    is_memory,
    read_files,
    read_pieces,
    read_through,
    written,
)
from gradus.bench.storage import FILES, PIECES, SEQUENTIAL, WRITING, Asked, Place, advice, bench_storage
from gradus.cli.main import app

ON_A_DISK = ("ext4", "xfs", "btrfs")


def place(path: str, sequential: float, files: float) -> Place:
    rates = {SEQUENTIAL: sequential, PIECES: sequential, FILES: files, WRITING: 1.0}
    return Place(path, "ext4", {what: Spread((rate,)) for what, rate in rates.items()}, {}, 0.0)


def test_a_dropped_file_is_no_longer_in_memory(tmp_path):
    path = tmp_path / "file"
    written(path, 3 << 20)
    read_through(path)
    assert held_share(path) == 1.0
    drop([path])
    kind = file_system(tmp_path)
    if is_memory(kind):
        assert held_share(path) == 1.0
    elif kind in ON_A_DISK:
        assert held_share(path) < 0.1


def test_reads_count_what_they_read(tmp_path):
    path = tmp_path / "file"
    written(path, 10_000)
    assert (read_through(path).pieces, read_through(path).bytes) == (1, 10_000)
    pieces = read_pieces(path, 1000, 100, 10.0, seed=1)
    assert (pieces.pieces, pieces.bytes) == (10, 10_000)  # each once, however many were wanted
    assert read_pieces(path, 1000, 4, 10.0, seed=1).bytes == 4000
    assert read_pieces(path, 1000, 100, 0.0, seed=1).pieces == 1  # the time is over after the first
    assert read_files([path, path], 10.0, seed=1).bytes == 20_000


def test_what_is_written_cannot_be_compressed(tmp_path):
    import zlib

    path = tmp_path / "file"
    written(path, 9 << 20)
    assert path.stat().st_size == 9 << 20
    content = path.read_bytes()
    assert len(zlib.compress(content[: 1 << 20], 1)) > 0.99 * (1 << 20)
    assert content[: 4 << 20] != content[4 << 20 : 8 << 20]


def test_a_folder_is_measured_and_left_as_it_was(tmp_path):
    result = bench_storage(str(tmp_path), Asked(1, 10, 12, 1.0, 2), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert [row["what"] for row in result.rows] == 2 * [WRITING, SEQUENTIAL, PIECES, FILES]
    assert all(row["megabytes_per_second"] > 0 for row in result.rows)
    assert result.summary["file_system"] == file_system(tmp_path)
    dropped = result.summary["page_cache_dropped"]
    assert dropped or file_system(tmp_path) not in ON_A_DISK
    assert dropped or any("no disk to measure" in note or "page cache" in note for note in result.notes)


def test_slow_small_files_are_to_be_packed_and_a_faster_disk_to_be_staged_to():
    pack, stage = advice([place("data", 1000.0, 100.0), place("/scratch", 2000.0, 2000.0)])
    assert "10% of the sequential rate" in pack
    assert "gradus data pack data packed" in pack
    assert "2.0 times as fast" in stage
    assert "gradus data stage packed --to /scratch" in stage


def test_where_nothing_is_to_be_gained_nothing_is_advised():
    assert advice([place("data", 1000.0, 900.0), place("/scratch", 1100.0, 1000.0)]) == []


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["missing"], "not there"),
        ([".", "--against", "missing"], "--against"),
        ([".", "--file-mib", "1", "--sample-kib", "2000"], "--sample-kib"),
        ([".", "--file-mib", str(1 << 40)], "free"),
        ([".", "--html", "."], "--html"),
    ],
)
def test_bad_input_is_refused(arguments, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "storage", *arguments])
    assert done.exit_code == 2, done.output
    assert found in done.output
    assert list(Path().iterdir()) == []
