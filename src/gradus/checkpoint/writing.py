"""Writing: a safetensors file of which one tensor at a time is held in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradus.checkpoint.part import PartLayout, lay_out, write_file
from gradus.checkpoint.reading import DTYPES, NAMES, flat_view
from gradus.schema.errors import InputError


@dataclass(frozen=True)
class Writable:
    """A tensor that is made when its turn comes."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    get: Callable[[], Tensor]


def dtype_name(name: str, tensor: Tensor) -> str:
    """The type of a tensor as safetensors spells it. What no safetensors file can hold is refused."""
    if tensor.dtype not in NAMES or tensor.layout != torch.strided:
        raise InputError(
            f"checkpoint: {name} is {tensor.dtype} and {tensor.layout}, which a checkpoint cannot hold",
            field="checkpoint",
            found=str(tensor.dtype),
            allowed=sorted(str(dtype) for dtype in NAMES),
        )
    return NAMES[tensor.dtype]


def write_tensors(file: Path, tensors: Mapping[str, Writable]) -> None:
    """Write a file that any safetensors reader takes, and that is there as a whole or not at all."""
    boxes = ((name, t.dtype, t.shape, (0,) * len(t.shape), t.shape) for name, t in tensors.items())
    layout = lay_out(file.name, boxes)
    write_file(file, layout, one_at_a_time(layout, lambda name: tensors[name].get()), abandoned=lambda: False)


def one_at_a_time(layout: PartLayout, get: Callable[[str], Tensor]) -> Callable[[int, int], memoryview]:
    """The bytes of a file in ascending order, for which each box is asked for when its turn comes, and then let go."""
    entries = iter([entry for entry in layout.entries if entry.byte_count])
    first, held = 0, memoryview(b"")

    def data(start: int, stop: int) -> memoryview:
        nonlocal first, held
        if start >= first + len(held):
            entry, held = next(entries), memoryview(b"")
            first, held = entry.start, bytes_of(get(entry.name), entry.box, DTYPES[entry.dtype])
        return held[start - first : stop - first]

    return data


def bytes_of(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> memoryview:
    found = tensor.detach().to("cpu")
    assert (tuple(found.shape), found.dtype) == (shape, dtype), f"{found.dtype} {found.shape}, not {dtype} {shape}"
    return flat_view(found.contiguous()).view(torch.uint8).numpy().data
