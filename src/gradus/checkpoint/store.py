"""Store: checkpoints on disk. One exists when its COMMITTED file does, and is used only if every byte is as written.

Nothing is pickled, so nothing in a checkpoint can run. What is in one: see `manifest`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradus.checkpoint.manifest import (
    COMMITTED,
    FORMAT,
    MANIFEST,
    TENSORS,
    DamagedCheckpoint,
    committed_steps,
    fingerprint,
    verify_folder,
)
from gradus.checkpoint.reading import read_tensor
from gradus.checkpoint.tensor_file import StoredTensor, read_header
from gradus.checkpoint.writing import Writable, in_file_order, writable, write_tensors


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: Path
    state: dict[str, Any]

    def stored(self) -> Mapping[str, StoredTensor]:
        """What tensors there are and where their bytes lie, to be read one by one, or only in part."""
        return read_header(self.path / TENSORS, "checkpoint").tensors

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, in host memory."""
        return {name: read_tensor(stored) for name, stored in self.stored().items()}


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        return list(committed_steps(self.folder))

    def save(self, step: int, tensors: Mapping[str, Tensor | Writable], state: Mapping[str, Any]) -> Checkpoint:
        """Write, checksum, flush to the disk, and only then commit. A failure is an OSError and leaves nothing.

        Each tensor is asked for once, in the order of the file, also after a failure: other ranks may be waiting to
        give their part of it.
        """
        path = self.path(step)
        made = {name: writable(name, t) if isinstance(t, Tensor) else t for name, t in tensors.items()}
        waiting = {name: tensor.get for name, tensor in in_file_order(made)}
        once = {name: Writable(t.dtype, t.shape, partial(_taken, waiting, name)) for name, t in made.items()}
        try:
            if path.exists():
                _remove(path)
            path.mkdir(parents=True)
            self._write(path, step, once, state)
            self.verify(step)
        except (DamagedCheckpoint, OSError) as error:
            shutil.rmtree(path, ignore_errors=True)
            for get in waiting.values():
                get()
            raise error if isinstance(error, OSError) else OSError(str(error)) from error
        return Checkpoint(step, path, dict(state))

    def _write(self, path: Path, step: int, tensors: Mapping[str, Writable], state: Mapping[str, Any]) -> None:
        write_tensors(path / TENSORS, tensors)
        manifest = {
            "format": FORMAT,
            "step": step,
            "written_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "files": {TENSORS: fingerprint(path / TENSORS)},
            "state": dict(state),
        }
        (path / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for name in (TENSORS, MANIFEST):
            _flush(path / name)
        _flush(path)
        (path / COMMITTED).write_text(json.dumps(fingerprint(path / MANIFEST)))
        _flush(path / COMMITTED)
        _flush(path)
        _flush(self.folder)

    def open(self, step: int) -> Checkpoint:
        """A verified checkpoint; anything that is not as it was written raises DamagedCheckpoint."""
        path = self.path(step)
        manifest = self.verify(step)
        return Checkpoint(step, path, manifest["state"])

    def verify(self, step: int) -> dict[str, Any]:
        """The manifest, after every file was compared with it."""
        return verify_folder(self.path(step))

    def newest(self) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
        """The newest checkpoint that can be trusted, and what was found wrong with newer ones."""
        damaged: list[DamagedCheckpoint] = []
        for step in reversed(self.steps()):
            try:
                return self.open(step), damaged
            except DamagedCheckpoint as error:
                damaged.append(error)
        return None, damaged

    def prune(self, verified_step: int, keep: int, also_keep: int | None = None) -> None:
        """Delete all but the newest `keep` up to the one that was just verified, and never the one to keep as well.

        Checkpoints of later steps are those that a resume has passed over as damaged: what follows them is another
        history now.
        """
        steps = self.steps()
        kept = {*[step for step in steps if step <= verified_step][-keep:], also_keep}
        for step in steps:
            if step not in kept:
                _remove(self.path(step))


def _taken(waiting: dict[str, Callable[[], Tensor]], name: str) -> Tensor:
    return waiting.pop(name)()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    (path / COMMITTED).unlink(missing_ok=True)  # first: a half-deleted checkpoint must not look like a whole one
    shutil.rmtree(path)
