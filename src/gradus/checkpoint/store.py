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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
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
        """Write, checksum, flush to the disk, and only then commit. A failure is an OSError and leaves nothing."""
        path = self.path(step)
        if path.exists():
            _remove(path)
        path.mkdir(parents=True)
        try:
            self._write(path, step, tensors, state)
            self.verify(step)
        except (SafetensorError, DamagedCheckpoint, OSError) as error:
            shutil.rmtree(path, ignore_errors=True)
            raise error if isinstance(error, OSError) else OSError(str(error)) from error
        return Checkpoint(step, path, dict(state))

    def _write(self, path: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        save_file(_on_host(tensors), path / TENSORS)
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

    def open(self, step: int) -> Checkpoint:
        """A verified checkpoint; anything that is not as it was written raises DamagedCheckpoint."""
        path = self.path(step)
        manifest = self.verify(step)
        return Checkpoint(step, path, manifest["state"])

    def verify(self, step: int) -> dict[str, Any]:
        """The manifest, after every file was compared with it."""
        path = self.path(step)
        _compare(path / MANIFEST, _read_json(path / COMMITTED), COMMITTED)
        manifest = _read_json(path / MANIFEST)
        if manifest["format"] != FORMAT:
            raise DamagedCheckpoint(f"{path}: format {manifest['format']}, this version reads {FORMAT}", path=str(path))
        for name, fingerprint in manifest["files"].items():
            _compare(path / name, fingerprint, MANIFEST)
        with _readable(path / TENSORS), safe_open(path / TENSORS, "pt"):  # reads the header
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


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies where needed; each with memory of its own, because safetensors refuses to save it twice."""
    on_host: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        on_host[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return on_host


def _fingerprint(file: Path) -> dict[str, Any]:
    checksum, size = 0, 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def _compare(file: Path, expected: Mapping[str, Any], recorded_in: str) -> None:
    with _readable(file):
        found = _fingerprint(file)
    if found != expected:
        raise DamagedCheckpoint(
            f"{file}: found {found['bytes']} bytes with checksum {found['crc32']}, but according to {recorded_in} "
            f"{expected.get('bytes')} with {expected.get('crc32')} were written",
            path=str(file),
        )


def _read_json(file: Path) -> dict[str, Any]:
    with _readable(file):
        document = json.loads(file.read_text())
        if not isinstance(document, dict):
            raise ValueError(f"found {type(document).__name__}, not a mapping")
        return document


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """What cannot be read is damaged, and the error names the file."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{file}: {type(error).__name__}: {error}", path=str(file)) from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    (path / COMMITTED).unlink(missing_ok=True)  # first: a half-deleted checkpoint must not look like a whole one
    shutil.rmtree(path)
