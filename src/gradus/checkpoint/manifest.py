"""Manifest: whether a checkpoint on disk is byte for byte what was written. No torch.

step-00000100/
  tensors.safetensors   everything that is a tensor, by name
  MANIFEST.json         size and checksum of every file, and all state that is not a tensor
  COMMITTED             written last; holds the checksum of the manifest
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradus.checkpoint.tensor_file import read_header
from gradus.schema.errors import GradusError, InputError

# 2: rows of `attention.qkv` lie in groups, one for each key-value head. Read as 1 they would be taken for others.
FORMAT = 2
TENSORS, MANIFEST, COMMITTED = "tensors.safetensors", "MANIFEST.json", "COMMITTED"
_CHUNK_BYTES = 8 * 1024 * 1024


class DamagedCheckpoint(GradusError):
    """A checkpoint that is not byte for byte what was written."""

    kind = "damaged-checkpoint"


def committed_steps(folder: Path) -> dict[int, str]:
    """The committed checkpoints in a folder: step and the name of its folder, ascending."""
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return dict(sorted((int(m[1]), m[0]) for m in found if m and (folder / m[0] / COMMITTED).exists()))


def verify_folder(path: Path, *, every_byte: bool = True) -> dict[str, Any]:
    """The manifest of a checkpoint, after every file was compared with it; without `every_byte`, only their sizes."""
    _compare(path / MANIFEST, _read_json(path / COMMITTED), COMMITTED, every_byte=True)
    manifest = _read_json(path / MANIFEST)
    if manifest["format"] != FORMAT:
        raise InputError(
            f"{path}: a checkpoint of format {manifest['format']}, this version reads {FORMAT}",
            hint="the version that wrote it can bring its weights along: `gradus checkpoint export RUN --out FOLDER "
            "--layout huggingface`, then model.weights: FOLDER",
            found=manifest["format"],
            allowed=FORMAT,
            path=str(path),
        )
    for name, expected in manifest["files"].items():
        _compare(path / name, expected, MANIFEST, every_byte=every_byte)
    with _readable(path / TENSORS):
        read_header(path / TENSORS, "checkpoint")
    return manifest


def fingerprint(file: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    checksum, size = 0, 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def _compare(file: Path, expected: Mapping[str, Any], recorded_in: str, *, every_byte: bool) -> None:
    with _readable(file):
        if not every_byte and file.stat().st_size == expected.get("bytes"):
            return
        found = fingerprint(file)
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
    except InputError as error:
        raise DamagedCheckpoint(error.message, path=str(file)) from error
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{file}: {type(error).__name__}: {error}", path=str(file)) from error
