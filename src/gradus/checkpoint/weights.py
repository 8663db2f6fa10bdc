"""Weights: the named tensors that `model.weights` stands for, whatever kind of file or folder it is. No torch.

model.safetensors                 a file
folder/model.safetensors          a folder with one, as Hugging Face writes it, with config.json beside it
folder/model.safetensors.index.json   a folder with several, and which tensor is in which
checkpoints/step-00000100         a checkpoint of a run
runs/<name>/<id>                  a run: its newest checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gradus.checkpoint.manifest import committed_steps, is_checkpoint, stored_tensors, verify_folder
from gradus.checkpoint.own_names import by_own_names
from gradus.checkpoint.tensor_file import StoredTensor, read_header
from gradus.schema.errors import GradusError, InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
MODEL_PREFIX, ADAPTER_MARK = "model.", "base.fingerprint"
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Weights:
    """Tensors by name, without the bytes, and the Hugging Face configuration beside them, if there is one."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any] | None = None


def open_weights(path: Path, field: str = "model.weights", *, every_byte: bool = True) -> Weights:
    """The tensors that a file or folder holds.

    With `every_byte`, all of a checkpoint is compared with its digests now, and not only what is read of it later.
    """
    if path.is_file():
        return _single_file(path, field, every_byte)
    if not path.is_dir():
        raise InputError(
            f"{field}: {path}: no such file or folder", field=field, found=str(path), allowed=_allowed_kinds()
        )
    if is_checkpoint(path):
        return _checkpoint(path, field, every_byte)
    if (path / "checkpoints").is_dir() and (path / "attempts").is_dir():
        steps = committed_steps(path / "checkpoints")
        if not steps:
            raise InputError(f"{field}: the run {path} has no checkpoint yet", field=field, found=str(path))
        return _checkpoint(path / "checkpoints" / steps[max(steps)], field, every_byte)
    if (path / INDEX).exists():
        return Weights(path, _sharded(path, field), _config(path, field))
    files = sorted(path.glob("*.safetensors"))
    chosen = path / SINGLE if path / SINGLE in files else files[0] if len(files) == 1 else None
    if chosen is not None:
        return Weights(path, _in_file(chosen, field), _config(path, field))
    raise _no_weights(path, [file.name for file in files], field)


def _single_file(path: Path, field: str, every_byte: bool) -> Weights:
    if path.suffix in _PICKLED:
        raise _pickled(path, field)
    if path.name == INDEX or is_checkpoint(path.parent):  # one file of several
        return open_weights(path.parent, field, every_byte=every_byte)
    return Weights(path, _in_file(path, field), _config(path.parent, field) if path.name == SINGLE else None)


def _in_file(path: Path, field: str) -> Mapping[str, StoredTensor]:
    return MappingProxyType(by_own_names(read_header(path, field).tensors))


def _checkpoint(path: Path, field: str, every_byte: bool) -> Weights:
    try:
        tensors = stored_tensors(path, verify_folder(path, every_byte=every_byte))
    except GradusError as error:
        raise InputError(f"{field}: {error.message}", hint=error.hint, field=field, found=str(path)) from error
    if ADAPTER_MARK in tensors:
        run = path.parent.parent if path.parent.name == "checkpoints" else path
        raise InputError(
            f"{field}: {path} holds adapters (lora) and not the model that they belong to",
            hint=f"gradus checkpoint export {run} --out FOLDER merges both; then use model.weights: FOLDER",
            field=field,
            found=str(path),
        )
    of_model = {name.removeprefix(MODEL_PREFIX): t for name, t in tensors.items() if name.startswith(MODEL_PREFIX)}
    return Weights(path, MappingProxyType(of_model))


def _sharded(folder: Path, field: str) -> Mapping[str, StoredTensor]:
    index = _json(folder / INDEX, field)
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise InputError(f"{field}: {folder / INDEX} has no weight_map", field=field, found=str(folder / INDEX))
    files = {}
    for name in sorted(set(where.values())):
        if Path(name).name != name:  # an index from elsewhere must not point out of its folder
            raise InputError(f"{field}: {folder / INDEX} names a file elsewhere: {name!r}", field=field, found=name)
        files[name] = read_header(folder / name, field).tensors
    absent = sorted(name for name, file in where.items() if name not in files[file])
    if absent:
        raise InputError(
            f"{field}: {folder / INDEX} promises tensors that their files do not have: {', '.join(absent[:5])}",
            hint="was the folder copied whole?",
            field=field,
            found=absent,
        )
    return MappingProxyType(by_own_names({name: files[file][name] for name, file in where.items()}))


def _config(folder: Path, field: str) -> Mapping[str, Any] | None:
    return MappingProxyType(_json(folder / CONFIG, field)) if (folder / CONFIG).is_file() else None


def _json(file: Path, field: str) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{field}: {file} cannot be read: {error}", field=field, found=str(file)) from error
    if not isinstance(document, dict):
        raise InputError(f"{field}: {file} is not a mapping", field=field, found=str(file))
    return document


def _no_weights(folder: Path, files: list[str], field: str) -> InputError:
    pickled = sorted(file for file in folder.iterdir() if file.suffix in _PICKLED)
    if pickled and not files:
        return _pickled(pickled[0], field)
    found = f"it has {', '.join(files)} and no {INDEX}" if files else "it has no .safetensors file"
    hint = "name one of the files" if files else f"allowed: {_allowed_kinds()}"
    return InputError(f"{field}: {folder}: {found}", hint=hint, field=field, found=files or str(folder))


def _pickled(path: Path, field: str) -> InputError:
    output = path.with_suffix(".safetensors")
    return InputError(
        f"{field}: {path} is a pickled file, which could run code when it is opened",
        hint=f"gradus checkpoint import {path} --out {output}, then model.weights: {output}",
        field=field,
        found=str(path),
        allowed=_allowed_kinds(),
    )


def _allowed_kinds() -> str:
    return "a .safetensors file, a folder with some, a checkpoint, or a run"
