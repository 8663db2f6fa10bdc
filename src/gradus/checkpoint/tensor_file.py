"""Tensor file: what is in a safetensors file, read from its header and believed only where the sizes add up. No torch.

The format is 8 bytes with the length of a JSON header, the header, and the tensors' bytes one after the other. It is
read here without the library because that maps the file into memory, and every page that was touched then counts as the
process's own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gradus.schema.errors import InputError

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"), 1),
}
_LARGEST_HEADER_BYTES = 100_000_000  # as in the safetensors library


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, all of whose bytes lie one after the other in a file."""

    file: Path
    offset: tuple[int, ...]  # where in the whole tensor the box begins
    shape: tuple[int, ...]  # the box's own
    start: int  # from the beginning of the file
    byte_count: int
    digests: tuple[str, ...] | None = None  # one for each block of BLOCK_BYTES; None: nobody has taken any
    copy: Path | None = None  # the same file elsewhere, for when this one is not as it was written


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in files: what it is, and where its bytes lie."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # which make up the whole
    name: str = ""  # for messages

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorFile:
    path: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_header(path: Path, field: str) -> TensorFile:
    """The tensors of a file. Anything that is not a sound safetensors file is an InputError about `field`."""
    try:
        with path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little") if size >= 8 else 0
            if not 2 <= length <= min(size - 8, _LARGEST_HEADER_BYTES):
                raise ValueError(f"its first 8 bytes promise a header of {length} bytes, and it has {size} in all")
            header = json.loads(stream.read(length), object_pairs_hook=_no_name_twice)
        return _checked(path, header, size, 8 + length)
    except OSError as error:
        raise InputError(f"{field}: {path}: {error.strerror}", field=field, found=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{field}: {path} is not a safetensors file: {error}",
            hint="gradus checkpoint import FILE.pt --out FILE.safetensors turns a .pt, .pth or .bin file into one",
            field=field,
            found=str(path),
            allowed="a safetensors file",
        ) from error


def _checked(path: Path, header: Any, size: int, data_start: int) -> TensorFile:
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}, not a mapping")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is not a mapping of text")
    tensors = {name: _stored(path, name, entry, data_start) for name, entry in header.items()}
    position = data_start
    pieces = ((name, tensor.pieces[0]) for name, tensor in tensors.items())
    for name, piece in sorted(pieces, key=lambda item: (item[1].start, item[1].byte_count)):
        if piece.start != position:
            raise ValueError(f"{name!r} begins at byte {piece.start}, but the bytes before it end at {position}")
        position += piece.byte_count
    if position != size:
        raise ValueError(f"its tensors end at byte {position}, and it has {size}: it was cut off, or is not whole")
    return TensorFile(path, MappingProxyType(tensors), MappingProxyType(metadata))


def _stored(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{name!r} is of type {dtype!r}, allowed: {', '.join(ITEM_BYTES)}")
    if not whole_numbers(shape) or not whole_numbers(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r} has shape {shape!r} and offsets {offsets!r}")
    byte_count = offsets[1] - offsets[0]
    if byte_count != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name!r} of type {dtype} and shape {shape} does not fill its {byte_count} bytes")
    piece = Piece(path, (0,) * len(shape), tuple(shape), data_start + offsets[0], byte_count)
    return StoredTensor(dtype, tuple(shape), (piece,), name)


def whole_numbers(value: Any) -> bool:
    """Whether something that was read is a list of sizes."""
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header names something twice")
    return found
