"""Manifest: whether a checkpoint on disk is byte for byte what was written, and what is in it. No torch.

step-00000100/
  part-00000-of-00004.safetensors   the boxes of tensors that rank 0 wrote, by the tensors' names; and one for each rank
  MANIFEST.json         size and digest of every file, what tensors there are and which boxes make them up, with the
                        digest of each block of their bytes; versions and hashes; and all state that is not a tensor
  COMMITTED             written last; holds size and digest of the manifest
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradus.checkpoint.commit import FORMAT, MANIFEST, committed_text, tiles
from gradus.checkpoint.digest import BLOCK_BYTES, digest, file_digest
from gradus.checkpoint.own_names import by_own_names
from gradus.checkpoint.part import COMMITTED
from gradus.checkpoint.patience import GONE, patiently
from gradus.checkpoint.step_folder import step_folders, step_of
from gradus.checkpoint.tensor_file import ITEM_BYTES, Piece, StoredTensor, whole_numbers
from gradus.schema.errors import GradusError, InputError

__all__ = [
    "COMMITTED",
    "FORMAT",
    "MANIFEST",
    "DamagedCheckpoint",
    "committed_steps",
    "is_checkpoint",
    "read_manifest",
    "stored_tensors",
    "verify_folder",
]
_PARTS = "part-*-of-*.safetensors"


class DamagedCheckpoint(GradusError):
    """A checkpoint that is not byte for byte what was written."""

    kind = "damaged-checkpoint"


def committed_steps(folder: Path) -> dict[int, str]:
    """The committed checkpoints in a folder: step and the name of its folder, ascending."""
    return patiently(
        folder, lambda: {step: path.name for step, path in step_folders(folder) if _is_there(path / COMMITTED)}
    )


def _is_there(file: Path) -> bool:
    """Unlike Path.exists, which in some versions of Python takes a file for missing that cannot be looked at."""
    try:
        os.stat(file)
    except GONE:
        return False
    return True


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a checkpoint, whole or not."""
    return any((folder / name).exists() for name in (COMMITTED, MANIFEST)) or any(folder.glob(_PARTS))


def verify_folder(path: Path, *, every_byte: bool = True) -> dict[str, Any]:
    """The manifest of a checkpoint, after every file was compared with it.

    Without `every_byte`, of the files with tensors only sizes and headers: whoever reads a tensor compares its bytes.
    """
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        _compare(path / name, expected, every_byte)
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint as it was committed. The files that it names are not looked at."""
    manifest = _committed_manifest(path)
    step = step_of(path.name)
    with _readable(path / MANIFEST):
        if step is not None and manifest.get("step") != step:
            raise ValueError(f"it is of step {manifest.get('step')}, and the folder's name says {step}")
        _check_form(manifest)
        stored_tensors(path, manifest)
    return manifest


def stored_tensors(path: Path, manifest: Mapping[str, Any], local: Path | None = None) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, of which no byte is read yet. With `local`, from copies there where they exist.

    By their own names: models that were compiled once had others in checkpoints.
    """
    with _readable(path / MANIFEST):
        files, entries = manifest["files"], manifest["tensors"]
        where = {name: _chosen(name, path, local, described["bytes"]) for name, described in files.items()}
        return by_own_names({name: _stored(name, entry, files, where) for name, entry in entries.items()})


def _chosen(name: str, path: Path, local: Path | None, size: int) -> tuple[Path, Path | None]:
    """A file to read, and another one for when that is damaged."""
    if local is not None:
        try:
            if (local / name).stat().st_size == size:
                return local / name, path / name
        except OSError:
            pass  # none is there: most nodes have only their own parts
    return path / name, None


def _committed_manifest(path: Path) -> dict[str, Any]:
    with _readable(path / COMMITTED):
        committed = patiently(path / COMMITTED, (path / COMMITTED).read_bytes)
    with _readable(path / MANIFEST):
        content = patiently(path / MANIFEST, (path / MANIFEST).read_bytes)
        expected = committed_text(content)
        manifest = json.loads(content) if committed == expected else None
        if manifest is not None and not isinstance(manifest, dict):
            raise ValueError(f"found {type(manifest).__name__}, not a mapping")
    if manifest is None:
        manifest = _of_another_format(content, committed)
    if manifest is None:
        raise DamagedCheckpoint(
            f"{path / MANIFEST}: found {_shown(expected)}, but according to {COMMITTED} {_shown(committed)} were "
            "written",
            path=str(path / MANIFEST),
        )
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{path}: a checkpoint of format {manifest.get('format')}, this version reads {FORMAT}",
            hint="the version that wrote it can bring its weights along: `gradus checkpoint export RUN --out FOLDER "
            "--layout huggingface`, then model.weights: FOLDER",
            found=manifest.get("format"),
            allowed=FORMAT,
            path=str(path),
        )
    return manifest


def _of_another_format(content: bytes, committed: bytes) -> dict[str, Any] | None:
    """The manifest of a checkpoint before format 3, which had checksums of another kind, if it is as it was written."""
    try:
        expected, manifest = json.loads(committed), json.loads(content)
    except (ValueError, RecursionError):
        return None
    as_written = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"} == expected
    return manifest if as_written and isinstance(manifest, dict) and manifest.get("format") != FORMAT else None


def _shown(committed: bytes) -> str:
    """What COMMITTED says, or what is found in its place."""
    try:
        return _as_text(json.loads(committed))
    except (ValueError, AttributeError, TypeError):
        return f"{committed[:60]!r}"


def _check_form(manifest: Mapping[str, Any]) -> None:
    """What is used of a manifest without a further look is there, and of the right kind."""
    for key in ("state", "files", "tensors"):
        if not isinstance(manifest.get(key), dict):
            raise ValueError(f"its {key!r} is not a mapping")
    for name, file in manifest["files"].items():
        if Path(name).name != name or not isinstance(file, dict) or not isinstance(file.get("header"), dict):
            raise ValueError(f"its entry of the file {name!r} is not one")
        if not whole_numbers([file.get("bytes"), file["header"].get("bytes")]):
            raise ValueError(f"its entry of the file {name!r} has no sizes")


def _stored(
    name: str, entry: Any, files: Mapping[str, Any], where: Mapping[str, tuple[Path, Path | None]]
) -> StoredTensor:
    if not isinstance(entry, dict) or entry.get("dtype") not in ITEM_BYTES or not whole_numbers(entry.get("shape")):
        raise ValueError(f"its entry of the tensor {name!r} is not one")
    pieces = tuple(_piece(name, piece, ITEM_BYTES[entry["dtype"]], files, where) for piece in entry["pieces"])
    if not tiles(entry["shape"], [(piece.offset, piece.shape) for piece in pieces]):
        raise ValueError(f"the pieces of {name!r} do not make up {entry['shape']}")
    return StoredTensor(entry["dtype"], tuple(entry["shape"]), pieces, name)


def _piece(
    name: str, piece: Any, item_bytes: int, files: Mapping[str, Any], where: Mapping[str, tuple[Path, Path | None]]
) -> Piece:
    if not isinstance(piece, dict) or piece.get("file") not in files:
        raise ValueError(f"a piece of {name!r} is in a file that is not listed")
    sizes = (piece.get("offset"), piece.get("shape"), [piece.get("start"), piece.get("bytes")])
    digests = piece.get("digests")
    if not all(map(whole_numbers, sizes)) or not isinstance(digests, list):
        raise ValueError(f"a piece of {name!r} has no sizes or digests")
    start, count, file = piece["start"], piece["bytes"], files[piece["file"]]
    if (
        count != math.prod(piece["shape"]) * item_bytes
        or not file["header"]["bytes"] <= start <= start + count <= file["bytes"]
        or len(digests) != -(-count // BLOCK_BYTES)
    ):
        raise ValueError(f"a piece of {name!r}: {count} bytes from {start} on are not {piece['shape']} in its file")
    path, copy = where[piece["file"]]
    return Piece(path, tuple(piece["offset"]), tuple(piece["shape"]), start, count, tuple(digests), copy)


def _compare(file: Path, expected: Mapping[str, Any], every_byte: bool) -> None:
    with _readable(file):
        found = patiently(file, lambda: _found(file, expected, every_byte))
    if any(expected.get(key) != value for key, value in found.items()):
        raise DamagedCheckpoint(
            f"{file}: found {_as_text(found)}, but according to {MANIFEST} {_as_text(expected)} were written",
            path=str(file),
        )


def _found(file: Path, expected: Mapping[str, Any], every_byte: bool) -> dict[str, Any]:
    header = expected["header"]
    with file.open("rb") as stream:
        beginning = stream.read(header["bytes"])
    size = file.stat().st_size
    if size == expected["bytes"] and digest(beginning) != header.get("xxh3_64"):
        raise ValueError(f"its header, the first {len(beginning)} bytes, is not the one that was written")
    return file_digest(file) if every_byte else {"bytes": size}


def _as_text(described: Mapping[str, Any]) -> str:
    summed = f" with digest {described['xxh3_64']}" if "xxh3_64" in described else ""
    return f"{described.get('bytes')} bytes{summed}"


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """What is not there or makes no sense is damaged, and the error names the file."""
    try:
        yield
    except (*GONE, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedCheckpoint(f"{file}: {type(error).__name__}: {error}", path=str(file)) from error
