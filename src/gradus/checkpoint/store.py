"""Store: checkpoints on disk. One exists when its COMMITTED file does, and is used only if every byte is as written.

    step-00000100/
      tensors.safetensors   everything that is a tensor, by name
      MANIFEST.json         size and checksum of every file, and all state that is not a tensor
      COMMITTED             written last; holds the checksum of the manifest

Nothing is pickled, so nothing in a checkpoint can run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradus.schema.errors import GradusError

FORMAT = 1
TENSORS, MANIFEST, COMMITTED = "tensors.safetensors", "MANIFEST.json", "COMMITTED"
_CHUNK_BYTES = 8 * 1024 * 1024


class DamagedCheckpoint(GradusError):
    """A checkpoint that is not byte for byte what was written."""

    kind = "damaged-checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: Path
    state: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, in host memory."""
        return load_file(self.path / TENSORS)


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        found = (re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("step-*"))
        return sorted(int(m[1]) for m in found if m and (self.folder / m[0] / COMMITTED).exists())

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Checkpoint:
        """Write, checksum, flush to the disk, and only then commit."""
        path = self.path(step)
        if path.exists():
            _remove(path)
        path.mkdir(parents=True)
        save_file({name: _on_host(tensor) for name, tensor in tensors.items()}, path / TENSORS)
        manifest = {
            "format": FORMAT,
            "step": step,
            "written_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "files": {TENSORS: _fingerprint(path / TENSORS)},
            "state": dict(state),
        }
        (path / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for name in (TENSORS, MANIFEST):
            _flush(path / name)
        _flush(path)
        (path / COMMITTED).write_text(json.dumps(_fingerprint(path / MANIFEST)))
        _flush(path / COMMITTED)
        _flush(path)
        _flush(self.folder)
        return Checkpoint(step, path, dict(state))

    def open(self, step: int) -> Checkpoint:
        """A verified checkpoint; anything that is not as it was written raises DamagedCheckpoint."""
        path = self.path(step)
        manifest = self.verify(step)
        return Checkpoint(step, path, manifest["state"])

    def verify(self, step: int) -> dict[str, Any]:
        """The manifest, after every file was compared with it."""
        path = self.path(step)
        try:
            _compare(path / MANIFEST, json.loads((path / COMMITTED).read_text()))
            manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
            for name, fingerprint in manifest["files"].items():
                _compare(path / name, fingerprint)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DamagedCheckpoint(f"{path}: {type(error).__name__}: {error}", path=str(path)) from error
        if manifest["format"] != FORMAT:
            raise DamagedCheckpoint(f"{path}: format {manifest['format']}, this version reads {FORMAT}", path=str(path))
        return manifest

    def newest(self) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
        """The newest checkpoint that can be trusted, and what was found wrong with newer ones."""
        damaged: list[DamagedCheckpoint] = []
        for step in reversed(self.steps()):
            try:
                return self.open(step), damaged
            except DamagedCheckpoint as error:
                damaged.append(error)
        return None, damaged

    def prune(self, keep: int, also_keep: int | None = None) -> None:
        """Delete all but the newest `keep`, and never the one to keep as well. Call after a newer one was verified."""
        for step in self.steps()[:-keep]:
            if step != also_keep:
                _remove(self.path(step))


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def _fingerprint(file: Path) -> dict[str, Any]:
    checksum, size = 0, 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def _compare(file: Path, expected: Mapping[str, Any]) -> None:
    found = _fingerprint(file)
    if found != expected:
        raise DamagedCheckpoint(
            f"{file}: found {found['bytes']} bytes with checksum {found['crc32']}, "
            f"written were {expected['bytes']} with {expected['crc32']}",
            path=str(file),
        )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    (path / COMMITTED).unlink(missing_ok=True)  # first: a half-deleted checkpoint must not look like a whole one
    shutil.rmtree(path)
