"""Snapshot: host memory that the state is copied into, and that the writer process reads.

It is a file without a name (memfd), laid out like the part that is written of it. Its pages are made once, pinned where
the state is on a GPU, and used for every save: a copy into fresh pages takes several times as long.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradus.checkpoint.owners import local_tensor, part_layout
from gradus.checkpoint.part import Entry, PartLayout
from gradus.checkpoint.reading import DTYPES
from gradus.hardware.host import available_memory, physical_memory
from gradus.record.format import bytes_text

if TYPE_CHECKING:
    from typing_extensions import Buffer

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python has no name for
_CHUNK_BYTES = 256 * 1024 * 1024  # of which pages are made at a time, before looking at what is left
# For the header of the file and what the writer is told with it: 16 MiB are enough for about 50,000 tensors, at the
# some 300 bytes that each takes with a name of 60 letters.
_BESIDE_TENSORS_BYTES = 16 * 1024 * 1024
# Of all memory, the part that is left to everybody else; among them the cache through which the file is written.
_LEFT_TO_OTHERS = 0.05


class NotEnoughMemory(Exception):
    """There is no room for a copy of the state in host memory."""


class Snapshot:
    """Memory for one copy of what a rank writes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.descriptor = os.memfd_create("gradus-snapshot", os.MFD_CLOEXEC)
        self._lock = threading.Lock()  # memory may be made in a thread while training goes on
        self._map: mmap.mmap | None = None
        self._memory: Tensor | None = None
        self.pinned = False
        self._targets: tuple[PartLayout, list[str], list[Tensor]] | None = None

    def reserve(self, byte_count: int) -> None:
        """See that there is room for a state of so many bytes, with all its pages, or raise NotEnoughMemory."""
        with self._lock:
            if self._memory is None or self._memory.numel() < byte_count:
                self._let_go()
                self._make(byte_count + _BESIDE_TENSORS_BYTES)

    def _make(self, size: int) -> None:
        size += -size % mmap.ALLOCATIONGRANULARITY
        already = os.fstat(self.descriptor).st_size
        try:
            _check_left(size - already, size)
            os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, size)
            self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
            for start in range(0, size, _CHUNK_BYTES):
                stop = min(start + _CHUNK_BYTES, size)
                _check_left(max(0, stop - max(start, already)), size)
                _make_pages(self._memory[start:stop])
            self._pin()
        except (OSError, NotEnoughMemory) as error:
            self._let_go()
            os.ftruncate(self.descriptor, 0)
            raise error if isinstance(error, NotEnoughMemory) else NotEnoughMemory(str(error)) from error

    def _pin(self) -> None:
        if self._device.type == "cuda" and self._memory is not None:
            with torch.cuda.device(self._device):
                found = _cuda().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
                self.pinned = int(found) == 0  # else copies are slower, and right all the same
                if not self.pinned:
                    with suppress(RuntimeError):  # takes the error away, which the next kernel would be blamed for
                        torch.zeros(1, device=self._device)

    def _let_go(self) -> None:
        if self.pinned and self._memory is not None:
            _cuda().cudaHostUnregister(self._memory.data_ptr())
        self.pinned, self._targets, self._memory, self._map = False, None, None, None

    def copy(self, layout: PartLayout, tensors: Mapping[str, Tensor], beside: bytes = b"") -> None:
        """The state as it is now, laid out like the file, and behind it some bytes more. Done when this returns."""
        self.reserve(layout.total_bytes + len(beside))
        with self._lock, torch.no_grad():
            memory, mapped = self._memory, self._map
            assert memory is not None
            assert mapped is not None
            if self._targets is None or self._targets[0] is not layout:
                entries = [entry for entry in layout.entries if entry.byte_count]
                self._targets = (layout, [e.name for e in entries], [_target(e, memory) for e in entries])
            names, targets = self._targets[1:]
            held = [tensors[name] for name in names]
            # One call for all: thousands of small tensors would otherwise cost as many calls from Python.
            if targets:  # a rank of many may have nothing to write
                torch._foreach_copy_(
                    targets, [t.to_local() if isinstance(t, DTensor) else t for t in held], non_blocking=True
                )
            mapped[layout.total_bytes : layout.total_bytes + len(beside)] = beside
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def bytes(self, start: int, stop: int) -> Buffer:
        assert self._map is not None
        return memoryview(self._map)[start:stop]

    def close(self) -> None:
        with self._lock:
            self._let_go()
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _target(entry: Entry, memory: Tensor) -> Tensor:
    return memory[entry.start : entry.start + entry.byte_count].view(DTYPES[entry.dtype]).view(entry.box)


def _make_pages(memory: Tensor) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, it lets other threads go on meanwhile
    if libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), _POPULATE_WRITE):
        if ctypes.get_errno() != 22:  # EINVAL: a kernel that does not know it
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        memory.zero_()


def _check_left(more: int, size: int) -> None:
    left, whole = available_memory(), physical_memory()[0]
    if left is not None and whole is not None and left - more < _LEFT_TO_OTHERS * whole:
        raise NotEnoughMemory(
            f"a copy of this rank's state takes {bytes_text(size)} of host memory, of which {bytes_text(left)} are left"
        )


def streamed(layout: PartLayout, tensors: Mapping[str, Tensor]) -> Callable[[int, int], Buffer]:
    """The bytes of a file from the tensors themselves, one of which is in host memory at a time."""
    starts = [entry.start for entry in layout.entries]
    held: tuple[Entry, Any] | None = None

    def data(start: int, stop: int) -> Buffer:
        nonlocal held
        # The last that begins there: those before it that begin there too are empty.
        entry = layout.entries[bisect.bisect_right(starts, start) - 1]
        if held is None or held[0] is not entry:
            held = None  # before the next one is made
            with torch.no_grad():
                flat = local_tensor(tensors[entry.name]).to("cpu").contiguous().view(-1).view(torch.uint8)
            held = (entry, flat.numpy().data)
        return memoryview(held[1])[start - entry.start : stop - entry.start]

    return data


class Layouts:
    """The layout of a rank's part, made anew only when something other than values has changed."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._kept: tuple[list[Any], PartLayout] | None = None

    def of(self, tensors: Mapping[str, Tensor]) -> PartLayout:
        described = [_described(name, tensor) for name, tensor in tensors.items()]
        if self._kept is None or self._kept[0] != described:
            self._kept = (described, part_layout(tensors, self._rank, self._ranks))
        return self._kept[1]


def _described(name: str, tensor: Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, DTensor):
        return name, tensor.dtype, tensor.shape, tensor.device_mesh, tensor.placements
    return name, tensor.dtype, tensor.shape
