"""Reading: bytes of a safetensors file into the memory of a tensor, a part at a time and never the whole file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gradus.checkpoint.tensor_file import StoredTensor
from gradus.schema.errors import InputError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK_BYTES = 32 * 1024 * 1024  # what is held besides the tensor itself, where bytes cannot go straight into it


@dataclass(frozen=True)
class Box:
    """The part of a tensor that this rank holds: for each dimension, where it begins and how long it is."""

    tensor: Tensor  # its memory here
    offset: tuple[int, ...]


def local_part(tensor: Tensor) -> Box:
    """All of a plain tensor; of one that is sharded over ranks, this rank's shard."""
    if not isinstance(tensor, DTensor):
        return Box(tensor.detach(), (0,) * tensor.dim())
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tensor.to_local().detach(), tuple(offset))


@torch.no_grad()
def read_rows(stored: StoredTensor, target: Tensor, first_row: int = 0, *, transposed: bool = False) -> None:
    """Fill the rows of `target` from `first_row` on with a stored tensor, or with its transpose.

    Of a sharded target, only the bytes of this rank's rows are read (of a transposed one, all of them, but never held).
    """
    part = local_part(target)
    assert part.tensor.device.type != "meta", "a model on the meta device has no memory yet: to_empty gives it some"
    shape = tuple(reversed(stored.shape)) if transposed else stored.shape
    box, offset = (part.tensor, part.offset) if part.tensor.dim() else (part.tensor.view(1), (0,))
    shape = shape or (1,)
    begin = max(first_row, offset[0])
    end = min(first_row + shape[0], offset[0] + box.shape[0])
    if end <= begin or not box.numel():
        return
    here = box[begin - offset[0] : end - offset[0]]
    lows = (begin - first_row, *offset[1:])
    if transposed:
        here, lows = here.T, (lows[1], lows[0])
    _fill(stored, here, lows)


def read_tensor(stored: StoredTensor) -> Tensor:
    """A stored tensor, in host memory."""
    tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    read_rows(stored, tensor)
    return tensor


def _fill(stored: StoredTensor, target: Tensor, lows: tuple[int, ...]) -> None:
    """Copy the box of the stored tensor that begins at `lows` and is as large as `target`."""
    dtype = DTYPES[stored.dtype]
    whole_rows = tuple(target.shape[1:]) == (stored.shape or (1,))[1:]
    row_bytes = stored.byte_count // max(1, (stored.shape or (1,))[0])
    with _descriptor(stored) as descriptor:
        start = stored.start + lows[0] * row_bytes
        if whole_rows and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
            _read_exactly(descriptor, target, start, stored)
            return
        rows_at_once = max(1, CHUNK_BYTES // max(1, row_bytes))
        for row in range(0, target.shape[0], rows_at_once):
            rows = min(rows_at_once, target.shape[0] - row)
            chunk = torch.empty((rows, *stored.shape[1:]), dtype=dtype)
            _read_exactly(descriptor, chunk, start + row * row_bytes, stored)
            for dim in range(1, chunk.dim()):
                chunk = chunk.narrow(dim, lows[dim], target.shape[dim])
            target[row : row + rows].copy_(chunk)


def _read_exactly(descriptor: int, target: Tensor, start: int, stored: StoredTensor) -> None:
    if not target.numel():
        return
    left = target.view(-1).view(torch.uint8).numpy().data
    while left:
        read = os.preadv(descriptor, [left], start)
        if read == 0:
            raise InputError(f"{stored.file}: it ended at byte {start}: was it changed meanwhile?")
        start += read
        left = left[read:]


@contextmanager
def _descriptor(stored: StoredTensor) -> Iterator[int]:
    try:
        descriptor = os.open(stored.file, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"{stored.file}: {error.strerror}", found=str(stored.file)) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two stored tensors are equal; two names for tied weights should be."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with _descriptor(a) as of_a, _descriptor(b) as of_b:
        for position in range(0, a.byte_count, CHUNK_BYTES):
            count = min(CHUNK_BYTES, a.byte_count - position)
            if os.pread(of_a, count, a.start + position) != os.pread(of_b, count, b.start + position):
                return False
    return True
