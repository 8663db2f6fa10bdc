"""Saved: the checkpoints of a run, as a result lists them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from gradus.checkpoint.manifest import COMMITTED, MANIFEST, committed_steps, verify_folder
from gradus.record.directory import RunDirectory
from gradus.record.format import bytes_text


@dataclass(frozen=True, repr=False)
class SavedCheckpoint:
    """A committed checkpoint. That it is whole is known after `verify`."""

    step: int
    path: Path

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    @property
    def saved_at(self) -> datetime:
        """When it was committed (UTC)."""
        try:
            return datetime.fromisoformat(json.loads((self.path / MANIFEST).read_text())["written_at"])
        except (OSError, ValueError, KeyError, TypeError):  # damaged, which is for `verify` to say
            return datetime.fromtimestamp((self.path / COMMITTED).stat().st_mtime, timezone.utc)

    def verify(self) -> None:
        """Compare every byte with what was written; raises DamagedCheckpoint with the file that differs."""
        verify_folder(self.path)

    def __repr__(self) -> str:
        saved = f"{self.saved_at:%Y-%m-%d %H:%M:%S}"
        return f"<checkpoint of step {self.step}: {bytes_text(self.size_bytes)}, saved {saved} UTC; {self.path}>"


def saved_checkpoints(run: RunDirectory) -> list[SavedCheckpoint]:
    """All that are committed, oldest first."""
    return [SavedCheckpoint(step, run.checkpoints / name) for step, name in committed_steps(run.checkpoints).items()]
