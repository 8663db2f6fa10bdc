"""Reading: bytes of safetensors files into the memory of a tensor, a part at a time and never the whole file.

Bytes that have digests are compared with them as they come, a block at a time and while they are in the processor's
cache: to load is to verify. Of a block that is wanted in part all is read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from gradus.checkpoint.digest import BLOCK_BYTES
from gradus.checkpoint.manifest import DamagedCheckpoint
from gradus.checkpoint.patience import patiently
from gradus.checkpoint.tensor_file import Piece, StoredTensor
from gradus.parallel.part import local_part
from gradus.schema.errors import GradusError, InputError

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
_CHUNKS_ON_THE_WAY = 4  # to a GPU, before the next is read
_CACHED_BYTES = 1024 * 1024  # read at once and then hashed: a processor's own cache holds about as much
_MOST_THREADS = 4  # of one process; others on the same node read as well
_MOST_FILES = 200  # kept open: a process may have about a thousand
_BLOCKS_FOR_THREADS = 4  # fewer are read sooner than threads are told to

# Rows that lie side by side in both: where they begin in the stored tensor and in the target, and how many they are.
Run = tuple[int, int, int]


@dataclass(frozen=True)
class _Wanted:
    """A box of some piece, in its coordinates, and the memory that it goes to."""

    target: Tensor
    low: tuple[int, ...]


@torch.no_grad()
def read_rows(
    stored: StoredTensor, target: Tensor, runs: Sequence[Run] | None = None, *, transposed: bool = False
) -> None:
    """Fill rows of `target` with those of a stored tensor, or of its transpose; without `runs`, all of them in order.

    Of a sharded target, only the blocks with this rank's rows are read (of a transposed one, all, but never held).
    """
    part = local_part(target)
    assert part.tensor.device.type != "meta", "a model on the meta device has no memory yet"
    shape = (tuple(reversed(stored.shape)) if transposed else stored.shape) or (1,)
    box, offset = (part.tensor, part.offset) if part.tensor.dim() else (part.tensor.view(1), (0,))
    if not box.numel():
        return
    wanted = []
    for theirs, ours, rows in runs or [(0, 0, shape[0])]:
        begin, end = max(ours, offset[0]), min(ours + rows, offset[0] + box.shape[0])
        if begin < end:
            here, low = box[begin - offset[0] : end - offset[0]], (theirs + begin - ours, *offset[1:])
            wanted.append(_Wanted(here.T, (low[1], low[0])) if transposed else _Wanted(here, low))
    for piece in stored.pieces:
        inside = [found for each in wanted if (found := _inside(each, piece)) is not None]
        # Of a transposed one, all need the same stored rows, and each some columns of them.
        together = [inside] if transposed and inside else [[each] for each in inside]
        with _Source(piece, stored.name) as source:
            for group in together:
                _fill(source, DTYPES[stored.dtype], piece.shape or (1,), 0, group)


def read_tensor(stored: StoredTensor) -> Tensor:
    """A stored tensor, in host memory."""
    tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    read_rows(stored, tensor)
    return tensor


def same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two stored tensors are equal; two names for tied weights should be."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.pieces == b.pieces:  # the same place
        return True
    rows, *rest = a.shape or (1,)
    at_once = max(1, CHUNK_BYTES // max(1, a.byte_count // max(1, rows)))
    for row in range(0, rows, at_once):
        count = min(at_once, rows - row)
        both = [torch.empty((count, *rest), dtype=DTYPES[a.dtype]) for _ in range(2)]
        for stored, tensor in zip((a, b), both, strict=True):
            read_rows(stored, tensor, [(row, 0, count)])
        if not torch.equal(*(flat_view(tensor).view(torch.uint8) for tensor in both)):
            return False
    return True


def flat_view(tensor: Tensor) -> Tensor:
    """All numbers of a contiguous tensor in a row. One that has a single number may claim any stride for it."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _inside(wanted: _Wanted, piece: Piece) -> _Wanted | None:
    """What of a wanted box lies in a piece, if anything does."""
    target, low = wanted.target, []
    for dim, (begin, offset, size) in enumerate(
        zip(wanted.low, piece.offset or (0,), piece.shape or (1,), strict=True)
    ):
        first, last = max(begin, offset), min(begin + target.shape[dim], offset + size)
        if first >= last:
            return None
        target = target.narrow(dim, first - begin, last - first)
        low.append(first - offset)
    return _Wanted(target, tuple(low))


def _fill(source: _Source, dtype: torch.dtype, shape: tuple[int, ...], start: int, wanted: Sequence[_Wanted]) -> None:
    """Copy boxes of a tensor whose bytes begin at `start` of the piece. All cover the same rows of it.

    What cannot go straight into a target is read once, in whole rows; of rows that are longer than a block, in turn,
    only what is wanted.
    """
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    first, rows = wanted[0].low[0], wanted[0].target.shape[0]
    if len(wanted) == 1 and tuple(wanted[0].target.shape[1:]) == shape[1:] and wanted[0].target.is_contiguous():
        _fill_flat(source, dtype, wanted[0].target, start + first * row_bytes, rows * row_bytes)
    elif row_bytes >= BLOCK_BYTES and len(shape) > 1:
        for row in range(rows):
            for each in wanted:
                inner = _Wanted(each.target[row], each.low[1:])
                _fill(source, dtype, shape[1:], start + (first + row) * row_bytes, [inner])
    else:
        _fill_from_rows(source, dtype, shape, start, wanted)


def _fill_flat(source: _Source, dtype: torch.dtype, target: Tensor, start: int, count: int) -> None:
    """Bytes that lie side by side in the piece and in the target."""
    flat = flat_view(target)
    if target.device.type == "cpu" and target.dtype == dtype:
        source.read(flat.view(torch.uint8).numpy().data, start)
        return
    # Chunks cut no block in two, but for the ends of what is wanted.
    for number, position in enumerate(range(start - start % BLOCK_BYTES, start + count, CHUNK_BYTES)):
        low, high = max(position, start), min(position + CHUNK_BYTES, start + count)
        staged = _staging(high - low, target.device)
        source.read(staged.numpy().data, low)
        begin = (low - start) // dtype.itemsize
        chunk = staged.view(dtype)
        flat[begin : begin + chunk.numel()].copy_(chunk, non_blocking=True)
        if target.device.type == "cuda" and number % _CHUNKS_ON_THE_WAY == _CHUNKS_ON_THE_WAY - 1:
            torch.cuda.current_stream(target.device).synchronize()


def _fill_from_rows(
    source: _Source, dtype: torch.dtype, shape: tuple[int, ...], start: int, wanted: Sequence[_Wanted]
) -> None:
    """Some columns of rows that are read as a whole, a few at a time."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    first, rows = wanted[0].low[0], wanted[0].target.shape[0]
    at_once = max(1, CHUNK_BYTES // row_bytes)
    for row in range(0, rows, at_once):
        count = min(at_once, rows - row)
        staged = _staging(count * row_bytes, wanted[0].target.device)
        source.read(staged.numpy().data, start + (first + row) * row_bytes)
        whole = staged.view(dtype).view(count, *shape[1:])
        for each in wanted:
            chunk = whole
            for dim in range(1, whole.dim()):
                chunk = chunk.narrow(dim, each.low[dim], each.target.shape[dim])
            each.target[row : row + count].copy_(chunk)


def _staging(count: int, device: torch.device) -> Tensor:
    """Memory on the way to a tensor. Pinned for a GPU: torch gives it out again when the copy from it is done."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=device.type == "cuda")


class _Source:
    """A piece in its file, open to be read."""

    def __init__(self, piece: Piece, name: str) -> None:
        self.piece = piece
        self._name = name
        self._file = piece.file
        self._descriptor: int | None = None
        self._last: tuple[int, memoryview] | None = None  # a block that was wanted in part: its rest often comes next

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor is not None and self._descriptor not in _kept_open.values():
            os.close(self._descriptor)
        self._descriptor = None

    def read(self, memory: memoryview, start: int) -> None:
        """Fill memory with the bytes from `start` of the piece on; where they are not as written, the copy's."""
        if self.piece.copy is not None and self._file != self.piece.copy:
            try:
                self._read(memory, start)
                return
            except (DamagedCheckpoint, OSError):
                self._let_go()
                self._file = self.piece.copy
        try:
            if self.piece.digests is None:
                self._read(memory, start)
            else:
                patiently(self._file, lambda: self._read_anew(memory, start))
        except OSError as error:
            raise self._problem(f"{self._file}: {error.strerror}") from error

    def _read_anew(self, memory: memoryview, start: int) -> None:
        """After a failure with the file opened anew: what a server has forgotten stays so for who has it open."""
        try:
            self._read(memory, start)
        except OSError:
            self._let_go()
            raise

    def _let_go(self) -> None:
        if self._descriptor is not None:
            if _kept_open.get(self._file) == self._descriptor:
                del _kept_open[self._file]
            os.close(self._descriptor)
        self._descriptor = self._last = None

    def _read(self, memory: memoryview, start: int) -> None:
        if self._descriptor is None:
            self._descriptor = _opened(self._file)
        numbers = range(start // BLOCK_BYTES, -(-(start + len(memory)) // BLOCK_BYTES))
        if len(numbers) < _BLOCKS_FOR_THREADS:
            self._read_blocks(memory, start, numbers)
            return
        each = -(-len(numbers) // _thread_count())
        shares = [numbers[first : first + each] for first in range(0, len(numbers), each)]
        reading = [_threads().submit(self._read_blocks, memory, start, share) for share in shares]
        wait(reading)  # for all of them, also where one fails: nobody may still be writing into the memory after this
        for done in reading:
            done.result()

    def _read_blocks(self, memory: memoryview, start: int, numbers: range) -> None:
        for number in numbers:
            begin = number * BLOCK_BYTES
            end = min(begin + BLOCK_BYTES, self.piece.byte_count)
            low, high = max(begin, start), min(end, start + len(memory))
            if (low, high) == (begin, end) or self.piece.digests is None:
                self._read_block(memory[low - start : high - start], low, number)
                continue
            last = self._last  # taken at once: threads read the ends of the same piece
            if last is None or last[0] != number:
                last = (number, memoryview(bytearray(end - begin)))
                self._read_block(last[1], begin, number)
                self._last = last
            memory[low - start : high - start] = last[1][low - begin : high - begin]

    def _read_block(self, memory: memoryview, start: int, number: int) -> None:
        """Bytes within one block; if they are to be compared, all of it."""
        assert self._descriptor is not None
        position, summed = 0, xxhash.xxh3_64()
        while position < len(memory):
            room = memory[position : position + _CACHED_BYTES]
            count = os.preadv(self._descriptor, [room], self.piece.start + start + position)
            if count == 0:
                raise self._problem(
                    f"{self._file}: it ended at byte {self.piece.start + start + position}: was it changed meanwhile?"
                )
            if self.piece.digests is not None:
                summed.update(room[:count])
            position += count
        if self.piece.digests is not None and summed.hexdigest() != self.piece.digests[number]:
            first = self.piece.start + start
            raise self._problem(
                f"{self._file}: bytes {first} to {first + len(memory)}, of {self._name}, have the digest "
                f"{summed.hexdigest()}, and bytes with {self.piece.digests[number]} were written"
            )

    def _problem(self, message: str) -> GradusError:
        if self.piece.digests is None:
            return InputError(message, found=str(self._file))
        return DamagedCheckpoint(message, path=str(self._file))


_kept_open: dict[Path, int] = {}
_keeping = False


@contextmanager
def files_kept_open() -> Iterator[None]:
    """While many tensors are read from a few files: to open one again and again takes its time on a network."""
    global _keeping
    if _keeping:
        yield
        return
    _keeping = True
    try:
        yield
    finally:
        _keeping = False
        while _kept_open:
            os.close(_kept_open.popitem()[1])


def _opened(file: Path) -> int:
    if file in _kept_open:
        return _kept_open[file]
    descriptor = os.open(file, os.O_RDONLY)
    if _keeping and len(_kept_open) < _MOST_FILES:
        _kept_open[file] = descriptor
    return descriptor


@cache
def _thread_count() -> int:
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_thread_count(), thread_name_prefix="checkpoint-reading")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has the pool's object and none of its threads
