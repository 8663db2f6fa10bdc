"""W&B, the real one, offline: all folders of a run have its id, and the numbers that the files have."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watched_runs import begin, say, train

from gradus.record.directory import RunDirectory
from gradus.record.exporters import export


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    run = RunDirectory.create(tmp_path / "runs", "gpt", "r1")
    attempt = begin(run)
    (run.attempt_path(attempt) / "recipe.yaml").write_text("batch: 32\n")
    train(run, attempt, 1, 5)
    return run


def records(file: Path) -> Iterator[bytes]:
    """The records of a file of W&B, which has LevelDB's log format: pieces in blocks of 32 KiB, after a header."""
    data, at, parts = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block that is too short for a piece
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""


def read(folder: Path) -> tuple[list[dict[str, Any]], Any]:
    """The rows that W&B wrote, and what it says of the run."""
    from wandb.proto import wandb_internal_pb2

    [file] = folder.glob("*.wandb")
    rows, about = [], None
    for data in records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif record.WhichOneof("record_type") == "run" and about is None:
            about = record.run
    return rows, about


def test_wandb_has_the_numbers_of_the_files_in_one_run_across_attempts(trained, capsys):
    place, sent = export(trained, "wandb")
    assert sent == 5
    assert str(trained.path / "wandb") in place
    train(trained, begin(trained, step=3), 4, 6)
    say(trained, "finished", 6, attempt=2)
    export(trained, "wandb")
    folders = sorted((trained.path / "wandb").glob("offline-run-*"), key=lambda one: one.stat().st_mtime_ns)
    (first, about), (second, about_again) = map(read, folders)
    assert [(row["step"], row["train/loss"]) for row in first] == [(step, 5.0 - step / 50) for step in range(1, 6)]
    assert [row["step"] for row in second] == [4, 5, 6]
    assert about.run_id == about_again.run_id == "gpt-r1"
    assert about.project == "gpt"
    assert capsys.readouterr().err == ""
