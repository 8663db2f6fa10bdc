"""Checkpoints are listed while the run that they are of removes some of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradus.launcher.saved import SavedCheckpoint


def test_a_folder_that_is_removed_while_it_is_read_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "inside").mkdir()
    for name in ("part-0.safetensors", "part-1.safetensors", "inside/another"):
        (tmp_path / name).write_bytes(b"12345")
    saved = SavedCheckpoint(3, tmp_path)
    assert (saved.size_bytes, saved.parts) == (15, 2)
    real = os.scandir

    def gone(path: str | Path) -> object:
        if Path(path).name == "inside":
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", gone)
    assert (saved.size_bytes, saved.parts) == (10, 2)
