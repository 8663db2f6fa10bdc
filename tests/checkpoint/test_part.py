"""A part: what the record says is what the disk gives back, and a failure leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradus.checkpoint import part
from gradus.checkpoint.digest import BLOCK_BYTES, digest, file_digest
from gradus.checkpoint.part import (
    COMMITTED,
    Abandoned,
    PartLayout,
    PartRecord,
    lay_out,
    part_name,
    read_record,
    write_part,
    write_record,
)

BOXES = [("w", "F32", (4, 3), (2, 0), (2, 3)), ("flags", "BOOL", (5,), (0,), (5,)), ("n", "I64", (), (), ())]
NOTHING = ("nothing", "F32", (0, 3), (0, 0), (0, 3))


def contents(layout: PartLayout) -> bytes:
    """Bytes of such a file that are not all the same."""
    body = bytes(n % 251 for n in range(layout.total_bytes - len(layout.header)))
    return layout.header + body


def data_of(layout: PartLayout) -> Callable[[int, int], bytes]:
    whole = contents(layout)
    return lambda start, stop: whole[start:stop]


def never() -> bool:
    return False


def test_a_file_begins_with_its_header_and_the_widest_types() -> None:
    layout = lay_out(part_name(3, 4), [*BOXES, NOTHING])
    assert layout.file_name == "part-00003-of-00004.safetensors"
    assert [entry.name for entry in layout.entries] == ["n", "nothing", "w", "flags"]
    for entry in layout.entries:
        assert entry.start % {"I64": 8, "F32": 4, "BOOL": 1}[entry.dtype] == 0
    ends = [0, *(stop for _, stop in layout.blocks())]
    assert [start for start, _ in layout.blocks()] == ends[:-1], "nothing is left out, and nothing there twice"
    assert ends[-1] == layout.total_bytes


def test_a_layout_and_a_record_survive_a_pipe(tmp_path: Path) -> None:
    layout = lay_out("part-00000-of-00001.safetensors", [*BOXES, NOTHING, ("ünïcode", "U8", (1,), (0,), (1,))])
    assert PartLayout.from_document(json.loads(json.dumps(layout.to_document()))) == layout
    record = write_part(tmp_path, layout, data_of(layout), abandoned=never, save_id="7")
    assert PartRecord.from_document(json.loads(json.dumps(record.to_document()))) == record


def test_the_record_says_what_is_in_the_file(tmp_path: Path) -> None:
    many = ("many", "U8", (3 * BLOCK_BYTES,), (0,), (2 * BLOCK_BYTES + 7,))
    layout = lay_out(part_name(0, 1), [*BOXES, many])
    record = write_part(tmp_path, layout, data_of(layout), abandoned=never, save_id="7")
    file = tmp_path / layout.file_name
    content = file.read_bytes()
    assert content == contents(layout)
    assert file_digest(file) == {"bytes": record.bytes, "xxh3_64": record.xxh3_64}
    assert record.header_xxh3_64 == digest(content[: record.header_bytes])
    for entry, digests in record.tensors:
        blocks = [content[start:stop] for start, stop in entry.blocks()]
        assert list(digests) == [digest(block) for block in blocks]
        assert b"".join(blocks) == content[entry.start : entry.start + entry.byte_count]
    assert [len(digests) for entry, digests in record.tensors if entry.name == "many"] == [3]
    assert load_file(file)["w"].shape == torch.Size([2, 3])


def test_a_record_is_there_when_its_part_is(tmp_path: Path) -> None:
    layout = lay_out(part_name(1, 2), BOXES)
    assert read_record(tmp_path, 1, 2) is None
    record = write_part(tmp_path, layout, data_of(layout), abandoned=never)
    assert read_record(tmp_path, 1, 2) is None
    write_record(tmp_path, record)
    assert read_record(tmp_path, 1, 2) == record
    (tmp_path / record.name).write_text("{}")
    with pytest.raises(OSError, match="is not a record"):
        read_record(tmp_path, 1, 2)


def test_what_was_committed_in_the_folder_is_not_any_more_when_writing_begins(tmp_path: Path) -> None:
    layout = lay_out(part_name(0, 2), BOXES)
    write_record(tmp_path, write_part(tmp_path, layout, data_of(layout), abandoned=never))
    (tmp_path / COMMITTED).write_text("x")
    seen = []

    def data(start: int, stop: int) -> bytes:
        seen.append(sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".partial"))
        return contents(layout)[start:stop]

    write_part(tmp_path, layout, data, abandoned=never)
    assert seen[0] == [layout.file_name], "neither COMMITTED nor the record of the part before"


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "preadv", "replace"])
def test_whatever_fails_is_an_os_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    layout = lay_out(part_name(0, 1), BOXES)

    def full(*arguments: Any, **keywords: Any) -> Any:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(part.os, call, full)
    with pytest.raises(OSError, match="no space left"):
        write_part(tmp_path, layout, data_of(layout), abandoned=never)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = lay_out(part_name(0, 1), BOXES)
    real = os.pwrite
    monkeypatch.setattr(part.os, "pwrite", lambda fd, block, at: real(fd, block[: max(1, len(block) // 3)], at))
    write_part(tmp_path, layout, data_of(layout), abandoned=never)
    assert (tmp_path / layout.file_name).read_bytes() == contents(layout)


def test_a_disk_that_gives_back_other_bytes_is_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = lay_out(part_name(0, 1), BOXES)
    real = os.fsync

    def rotting(descriptor: int) -> None:
        real(descriptor)
        os.pwrite(descriptor, b"?", layout.total_bytes - 1)

    monkeypatch.setattr(part.os, "fsync", rotting)
    with pytest.raises(OSError, match="are not those that were written"):
        write_part(tmp_path, layout, data_of(layout), abandoned=never)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("after", [0, 1, 3, 4, 6])
def test_a_part_that_nobody_wants_any_more_is_given_up(tmp_path: Path, after: int) -> None:
    layout = lay_out(part_name(0, 1), BOXES)
    asked = iter(range(100))
    with pytest.raises(Abandoned):
        write_part(tmp_path, layout, data_of(layout), abandoned=lambda: next(asked) >= after)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["digest", "part", "commit", "retention", "manifest", "tensor_file", "weights"])
def test_whoever_writes_or_looks_needs_neither_torch_nor_numpy(module: str) -> None:
    code = (
        f"import sys, gradus.checkpoint.{module}; sys.exit(bool({{'torch', 'numpy', 'pydantic'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
