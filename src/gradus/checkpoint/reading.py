"""Reading: bytes of a safetensors file into the memory of a tensor, a part at a time and never the whole file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradus.checkpoint.tensor_file import StoredTensor
from gradus.parallel.part import local_part
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

# Rows that lie side by side in both: where they begin in the stored tensor and in the target, and how many they are.
Run = tuple[int, int, int]


@torch.no_grad()
def read_rows(
    stored: StoredTensor, target: Tensor, runs: Sequence[Run] | None = None, *, transposed: bool = False
) -> None:
    """Fill rows of `target` with those of a stored tensor, or of its transpose; without `runs`, all of them in order.

    Of a sharded target, only the bytes of this rank's rows are read (of a transposed one, all of them, but never held).
    """
    part = local_part(target)
    assert part.tensor.device.type != "meta", "a model on the meta device has no memory yet"
    shape = (tuple(reversed(stored.shape)) if transposed else stored.shape) or (1,)
    box, offset = (part.tensor, part.offset) if part.tensor.dim() else (part.tensor.view(1), (0,))
    if not box.numel():
        return
    pieces = []
    for theirs, ours, rows in runs or [(0, 0, shape[0])]:
        begin, end = max(ours, offset[0]), min(ours + rows, offset[0] + box.shape[0])
        if begin < end:
            here, lows = box[begin - offset[0] : end - offset[0]], (theirs + begin - ours, *offset[1:])
            pieces.append((here.T, (lows[1], lows[0])) if transposed else (here, lows))
    with _descriptor(stored) as descriptor:
        if transposed:  # every piece needs the same stored rows, and each some columns of them
            _fill(stored, descriptor, pieces)
        else:
            for piece in pieces:
                _fill(stored, descriptor, [piece])


def read_tensor(stored: StoredTensor) -> Tensor:
    """A stored tensor, in host memory."""
    tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    read_rows(stored, tensor)
    return tensor


def _fill(stored: StoredTensor, descriptor: int, pieces: Sequence[tuple[Tensor, tuple[int, ...]]]) -> None:
    """Copy boxes of the stored tensor, each as large as its target; `lows` is where it begins. All cover the same rows.

    What does not go straight into a target is read once, however many pieces take their part of it.
    """
    if not pieces:
        return
    dtype = DTYPES[stored.dtype]
    target, lows = pieces[0]
    whole_rows = tuple(target.shape[1:]) == (stored.shape or (1,))[1:]
    row_bytes = stored.byte_count // max(1, (stored.shape or (1,))[0])
    start = stored.start + lows[0] * row_bytes
    if whole_rows and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
        _read_exactly(descriptor, target, start, stored)
        return
    rows_at_once = max(1, CHUNK_BYTES // max(1, row_bytes))
    all_rows = target.shape[0]
    for row in range(0, all_rows, rows_at_once):
        rows = min(rows_at_once, all_rows - row)
        whole = torch.empty((rows, *stored.shape[1:]), dtype=dtype)
        _read_exactly(descriptor, whole, start + row * row_bytes, stored)
        for target, lows in pieces:
            chunk = whole
            for dim in range(1, whole.dim()):
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
