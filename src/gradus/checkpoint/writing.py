"""Writing: a safetensors file of which one tensor at a time is held in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from gradus.checkpoint.reading import DTYPES, NAMES
from gradus.checkpoint.tensor_file import ITEM_BYTES
from gradus.schema.errors import InputError

_ALIGNMENT = 8  # of the tensors' bytes in the file


@dataclass(frozen=True)
class Writable:
    """A tensor that is made when its turn comes."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    get: Callable[[], Tensor]


def writable(name: str, tensor: Tensor) -> Writable:
    """A tensor that is there already. What no safetensors file can hold is refused."""
    if tensor.dtype not in NAMES or tensor.layout != torch.strided:
        raise InputError(
            f"checkpoint: {name} is {tensor.dtype} and {tensor.layout}, which a checkpoint cannot hold",
            field="checkpoint",
            found=str(tensor.dtype),
            allowed=sorted(str(dtype) for dtype in NAMES),
        )
    return Writable(NAMES[tensor.dtype], tuple(tensor.shape), tensor.detach)


def in_file_order(tensors: Mapping[str, Writable]) -> list[tuple[str, Writable]]:
    """As they come in a file: the widest types first, so that all lie aligned."""
    return sorted(tensors.items(), key=lambda item: (-ITEM_BYTES[item[1].dtype], item[0]))


def write_tensors(file: Path, tensors: Mapping[str, Writable]) -> None:
    """Write a file that any safetensors reader takes, and that is there as a whole or not at all."""
    ordered = in_file_order(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in ordered:
        end = position + math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    partial = file.with_name(file.name + ".partial")
    try:
        with partial.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in ordered:
                _write(stream, name, tensor)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _write(stream: BinaryIO, name: str, tensor: Writable) -> None:
    found = tensor.get().detach().to("cpu")
    assert tuple(found.shape) == tensor.shape, name
    assert found.dtype == DTYPES[tensor.dtype], name
    if found.numel():
        stream.write(found.contiguous().view(-1).view(torch.uint8).numpy().data)
