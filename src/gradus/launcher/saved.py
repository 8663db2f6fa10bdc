"""Saved: the checkpoints of a run, as a result and `gradus checkpoint` list them. No torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from gradus.checkpoint.commit import COMMITTED, MANIFEST
from gradus.checkpoint.damage import Damage, Report, damage
from gradus.checkpoint.manifest import committed_steps, verify_folder
from gradus.record.directory import RunDirectory
from gradus.record.format import bytes_text
from gradus.schema.plan import Mesh

_STEP = re.compile(r"step-(\d+)(\.removed)?")


@dataclass(frozen=True, repr=False)
class SavedCheckpoint:
    """A checkpoint, or what a save that never came to an end left of one. That it is whole is known after `verify`."""

    step: int
    path: Path

    @property
    def committed(self) -> bool:
        return (self.path / COMMITTED).exists()

    @property
    def size_bytes(self) -> int:
        return sum(_size(file) or 0 for file in self._files)

    @property
    def saved_at(self) -> datetime | None:
        """When it was committed (UTC); None: it was not."""
        if not self.committed:
            return None
        try:
            return datetime.fromisoformat(self.manifest["written_at"])
        except (ValueError, KeyError, TypeError):  # damaged, which is for `verify` to say
            pass
        try:
            return datetime.fromtimestamp((self.path / COMMITTED).stat().st_mtime, timezone.utc)
        except OSError:
            return None

    @property
    def parts(self) -> int:
        """How many files of tensors there are, which is how many ranks saved it."""
        files = self.manifest.get("files")
        return len(files) if isinstance(files, dict) else sum(file.suffix == ".safetensors" for file in self._files)

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that it was saved on, where it says so."""
        try:
            return Mesh.model_validate(self.manifest["mesh"])
        except (KeyError, ValueError):
            return None

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """What it says of itself, believed or not; nothing where that cannot be read."""
        try:
            document = json.loads((self.path / MANIFEST).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    @property
    def _files(self) -> Iterator[Path]:
        """What is there now. A run that is going on may be removing it: `os.walk` passes over what is gone."""
        return (Path(folder, name) for folder, _, names in os.walk(self.path) for name in names)

    @property
    def looks_damaged(self) -> bool:
        """Whether files are missing, or not as long as they were written. Their bytes are for `verify`."""
        files = self.manifest.get("files")
        if not self.committed:
            return False
        try:
            assert isinstance(files, dict)
            return any(_size(self.path / name) != described["bytes"] for name, described in files.items())
        except (AssertionError, KeyError, TypeError):
            return True  # of its manifest, too little is left to know

    def verify(self) -> None:
        """Compare every byte with what was written; raises DamagedCheckpoint with the file that differs."""
        verify_folder(self.path)

    def damage(self, report: Report | None = None) -> list[Damage]:
        """Everything that is not as it was written, file by file."""
        return damage(self.path, report)

    def __repr__(self) -> str:
        saved = f"saved {self.saved_at:%Y-%m-%d %H:%M:%S} UTC" if self.saved_at else "not committed"
        return f"<checkpoint of step {self.step}: {bytes_text(self.size_bytes)}, {saved}; {self.path}>"


def saved_checkpoints(run: RunDirectory) -> list[SavedCheckpoint]:
    """All that are committed, oldest first."""
    return [SavedCheckpoint(step, run.checkpoints / name) for step, name in committed_steps(run.checkpoints).items()]


def uncommitted(run: RunDirectory) -> list[SavedCheckpoint]:
    """What is no checkpoint: saves that are under way or never came to an end, and what is being deleted."""
    found = []
    for path in sorted(run.checkpoints.glob("step-*")):
        name = _STEP.fullmatch(path.name)
        if name and path.is_dir() and not (path / COMMITTED).exists():
            found.append(SavedCheckpoint(int(name[1]), path))
    return found


def _size(file: Path) -> int | None:
    """None for what is no file, and for what a run that is going on has just removed."""
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:
        return None
