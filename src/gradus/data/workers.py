"""Workers: processes that fetch ahead of the step, in order, and that cannot die or hang unnoticed.

Tasks are dealt out in turn and answered in turn. Every worker has a pipe of its own, so there is no lock that a killed
process could take with it. What they fetched comes back in shared memory that is used again as soon as nobody looks at
it any more: pages are mapped once, nothing is copied on this side, and a batch that somebody keeps stays as it is.
"""

from __future__ import annotations

import faulthandler
import io
import mmap
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from gradus.schema.errors import GradusError

Task = TypeVar("Task")

AHEAD = 4  # tasks that each worker has been given; planner/memory/host_memory.py counts them
SLOTS = AHEAD + 3  # pieces of shared memory of a worker: its answers, and those that this side still looks at
ALIGNED = 64  # bytes: a cache line
SMALL = 1024  # bytes: what is smaller travels through the pipe
PARENT_LOOK_SECONDS = 2.0  # between two looks of an idle worker at whether its parent is there
ENDING_SECONDS = 2.0  # that idle workers are given to end by themselves
TELL = signal.SIGUSR2  # upon which a worker writes down where it is
TELLING_SECONDS = 1.0
# A stop request goes to all processes of a job, and the batches on their way are still wanted before the save.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


_alive: weakref.WeakSet[Workers[Any]] = weakref.WeakSet()  # those of this process


def loader_stacks() -> str:
    """Where the loader workers of this process are; for whoever looks into a rank that hangs."""
    return "".join(
        f"\nloader worker {worker.number}, process {worker.process.pid}{_doing(workers, worker)}:\n{_stack(worker)}"
        for workers in list(_alive)
        for worker in list(workers._workers)
        if worker.process.is_alive()
    )


class WorkerFailed(GradusError):
    """A loader worker is gone, or gives no answer: names it, what ended it, and what it was doing."""

    kind = "loader-worker"


@dataclass
class _Slot:
    """Shared memory for one answer at a time. It has a file behind it, not a name: it is gone with its processes."""

    descriptor: int
    memory: mmap.mmap | None = None
    watched: Any = None

    def mapped(self, size: int) -> mmap.mmap:
        if self.memory is None or len(self.memory) < size:
            self.memory = mmap.mmap(self.descriptor, size)
        return self.memory

    def grown(self, size: int) -> mmap.mmap:
        """In a worker: at least `size` bytes."""
        if self.memory is None or len(self.memory) < size:
            size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self.descriptor, size)
            self.memory = None
        return self.mapped(size)


@dataclass
class _Worker(Generic[Task]):
    number: int
    process: BaseProcess
    connection: Connection
    slots: list[_Slot]
    free: deque[int]
    stack: int  # a file to which the worker writes where it is, when it gets TELL
    given: deque[Task] = field(default_factory=deque)


class Workers(Generic[Task]):
    """`count` processes that do `work`. To be closed; `describe` says in an error what a worker was doing."""

    _process_is_ending = staticmethod(sys.is_finalizing)  # kept here, since modules are emptied by then

    def __init__(
        self,
        work: Callable[[Task], Any],
        count: int,
        describe: Callable[[Task], str] = repr,
        timeout_seconds: float | None = None,
    ) -> None:
        self._describe = describe
        self._timeout_seconds = timeout_seconds
        self._workers: list[_Worker[Task]] = []
        # From the fork on: a signal between it and the worker's first line would end the worker.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        context = mp.get_context("fork")  # a user's dataset need not be picklable, and large ones are not copied
        try:
            for number in range(count):
                here, there = context.Pipe()
                slots = [_Slot(_anonymous_file()) for _ in range(SLOTS)]
                stack = _anonymous_file()
                not_its_own = [here, *(worker.connection for worker in self._workers)]
                process = context.Process(
                    target=_serve,
                    args=(work, there, not_its_own, slots, stack, number, count, os.getpid()),
                    name=f"loader worker {number}",
                    daemon=True,
                )
                process.start()
                there.close()  # before the next fork: the end of this worker must show here
                self._workers.append(_Worker(number, process, here, slots, deque(range(SLOTS)), stack))
        except OSError as error:
            _end([worker.process for worker in self._workers], [], at_once=True)
            raise GradusError(f"loader worker {len(self._workers)} of {count} cannot be started: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        descriptors = [slot.descriptor for worker in self._workers for slot in worker.slots]
        descriptors += [worker.stack for worker in self._workers]
        self._finalized = ([worker.process for worker in self._workers], descriptors)
        # Workers ignore SIGTERM, with which multiprocessing would end them at exit, and wait.
        self._finalize = Finalize(self, _end, (*self._finalized, True), exitpriority=100)
        _alive.add(self)

    def answers(self, tasks: Iterable[Task], ahead: int = AHEAD) -> Iterator[Any]:
        """What `work` made of each task, in the order of the tasks. An exception in a worker is raised here."""
        coming = iter(tasks)
        turns: deque[_Worker[Task]] = deque()
        for worker in self._workers * ahead:
            if not self._give(worker, coming):
                break
            turns.append(worker)
        while turns:
            worker = turns.popleft()
            answer = self._answer(worker)
            if self._give(worker, coming):
                turns.append(worker)
            yield answer

    def kill(self) -> None:
        """From another thread: whoever waits for an answer gets an error. To be closed all the same."""
        for worker in self._workers:
            worker.process.kill()

    def close(self, at_once: bool = True) -> None:
        """End the workers; those that are idle may do so by themselves."""
        if self._process_is_ending() or not self._finalize.still_active():  # then they end with it
            return
        if not at_once:
            for worker in self._workers:
                try:
                    worker.connection.send(None)
                except OSError:
                    continue
        self._finalize.cancel()
        _end(*self._finalized, at_once)
        for worker in self._workers:
            worker.connection.close()
            worker.slots.clear()

    def _give(self, worker: _Worker[Task], coming: Iterator[Task]) -> bool:
        try:
            task = next(coming)
        except StopIteration:
            return False
        # Without free memory, because somebody keeps batches, the answer comes through the pipe.
        # Of the free ones, the last that was used: those that are not needed take no memory.
        slot = worker.free.pop() if worker.free else None
        worker.given.append(task)
        try:
            worker.connection.send((slot, task))
        except OSError:
            raise self._failure(worker) from None
        return True

    def _answer(self, worker: _Worker[Task]) -> Any:
        ends = {each.process.sentinel: each for each in self._workers}
        found = wait([worker.connection, *ends], self._timeout_seconds)
        if worker.connection not in found:
            gone = [ends[end] for end in found if isinstance(end, int)]
            raise self._failure(gone[0]) if gone else self._late(worker)
        try:
            slot, sizes, content = worker.connection.recv()
        except (EOFError, OSError):
            raise self._failure(worker) from None
        worker.given.popleft()
        good, answer = pickle.loads(content, buffers=self._buffers(worker, slot, sizes))
        if good:
            return answer
        error, text = answer
        raise error from (None if isinstance(error, GradusError) else _InWorker(text))

    def _buffers(self, worker: _Worker[Task], number: int | None, sizes: list[int]) -> list[memoryview]:
        """The memory of an answer. The slot is free again when nothing refers to any of it."""
        if number is None or not sizes:
            if number is not None:
                worker.free.append(number)
            return []
        slot, places = worker.slots[number], _places(sizes)
        whole: Any = np.frombuffer(slot.mapped(places[-1]), np.uint8, places[-1])
        free = worker.free
        slot.watched = weakref.ref(whole, lambda _: free.append(number))
        view = memoryview(whole)
        return [view[place : place + size] for place, size in zip(places, sizes, strict=False)]

    def _failure(self, worker: _Worker[Task]) -> WorkerFailed:
        worker.process.join(ENDING_SECONDS)
        code = worker.process.exitcode
        fewer = f"plan.workers={len(self._workers) // 2}"
        if code is None:
            how, hint = "closed its pipe", "look at what the dataset does with open files"
        elif code >= 0:
            how = f"ended itself with exit code {code}"
            hint = "something that the dataset uses calls exit: with plan.workers=0 it happens in the rank, in sight"
        else:
            name = signal.Signals(-code).name
            how = f"was killed by {name}"
            hint = {
                "SIGKILL": "the kernel does that when host memory runs out (see dmesg): "
                f"use fewer workers ({fewer}) or a smaller plan.micro_batch",
                "SIGBUS": "a mapped file was cut short, or memory ran out (see dmesg): check the data and its disk, "
                f"or use fewer workers ({fewer})",
            }.get(
                name,
                "native code that the dataset uses has crashed: with plan.workers=0 it happens in the rank, in sight",
            )
        return self._told(worker, how, hint, signal=-code if code and code < 0 else None, exit_code=code)

    def _late(self, worker: _Worker[Task]) -> WorkerFailed:
        how = f"has given no answer for {self._timeout_seconds:g} s (data.timeout)"
        stack = _stack(worker)
        place = next((line.strip() for line in stack.splitlines() if line.strip().startswith("File")), "not known")
        hint = f"if reading may take so long, raise data.timeout; where it is: {place}"
        return self._told(worker, how, hint, traceback=stack)

    def _told(self, worker: _Worker[Task], how: str, hint: str, **details: Any) -> WorkerFailed:
        who = f"loader worker {worker.number} of {len(self._workers)} (pid {worker.process.pid})"
        return WorkerFailed(f"{who} {how}{_doing(self, worker)}", hint=hint, worker=worker.number, **details)


def _doing(workers: Workers[Any], worker: _Worker[Any]) -> str:
    return f" while fetching {workers._describe(worker.given[0])}" if worker.given else ""


def _stack(worker: _Worker[Any]) -> str:
    """Where a worker is that gives no answer; it tells by itself, even from inside native code."""
    os.kill(int(worker.process.pid or 0), TELL)
    deadline = time.monotonic() + TELLING_SECONDS
    while not (told := os.pread(worker.stack, 2**16, 0)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return told.decode(errors="replace")


class _InWorker(Exception):
    """The traceback in a worker, as the cause of the exception that is raised here."""

    def __str__(self) -> str:
        return f"in a loader worker:\n{self.args[0]}"


def _end(processes: list[BaseProcess], descriptors: list[int], at_once: bool) -> None:
    deadline = time.monotonic() + (0.0 if at_once else ENDING_SECONDS)
    for process in processes:
        if not at_once:
            process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
    for process in processes:
        process.join(ENDING_SECONDS)  # one that is stuck in the kernel is left to it
    for descriptor in descriptors:
        os.close(descriptor)


def _serve(
    work: Callable[[Any], Any],
    connection: Connection,
    not_its_own: list[Connection],
    slots: list[_Slot],
    stack: int,
    number: int,
    count: int,
    parent: int,
) -> None:
    """What a worker does until it is told to end, or is alone."""
    for each in IGNORED:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    faulthandler.register(TELL, stack, all_threads=False)
    for other in not_its_own:
        other.close()
    torch.set_num_threads(1)
    # What a user's dataset asks torch.utils.data.get_worker_info() for.
    info: dict[str, Any] = {"id": number, "num_workers": count, "seed": 0, "dataset": None}
    torch_worker._worker_info = torch_worker.WorkerInfo(**info)
    while True:
        while not connection.poll(PARENT_LOOK_SECONDS):
            if os.getppid() != parent:
                return
        try:
            given = connection.recv()
            if given is None:
                return
            slot, task = given
            connection.send(_reply(work, task, slots, slot))
        except (EOFError, OSError):
            return


def _reply(
    work: Callable[[Any], Any], task: Any, slots: list[_Slot], number: int | None
) -> tuple[int | None, list[int], bytes]:
    """The answer as the pipe carries it, with whatever is large in it in shared memory."""
    slot = slots[number] if number is not None else None
    try:
        content, buffers = _pickled((True, work(task)), slot is not None)
    except Exception as error:
        content, buffers = _pickled((False, (_sendable(error), traceback.format_exc())), False)
    sizes = [buffer.nbytes for buffer in buffers]
    if slot is not None and sizes:
        places = _places(sizes)
        memory = np.frombuffer(slot.grown(places[-1]), np.uint8)
        for place, buffer in zip(places, buffers, strict=False):
            memory[place : place + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
    return number, sizes, content


class _Pickler(pickle.Pickler):
    """Arrays and tensors that are large are left out and collected."""

    def __init__(self, stream: io.BytesIO, collect: list[memoryview] | None) -> None:
        self._apart = collect is not None

        def apart(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < SMALL:
                return True  # stays where it is
            assert collect is not None
            collect.append(view)
            return False

        super().__init__(stream, protocol=5, buffer_callback=apart if collect is not None else None)

    def reducer_override(self, given: Any) -> Any:
        if type(given) is not torch.Tensor or given.layout != torch.strided or given.device.type != "cpu":
            return NotImplemented
        flat: Any = given.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        content = pickle.PickleBuffer(flat) if self._apart else flat.tobytes()
        return _tensor, (content, given.dtype, tuple(given.shape))


def _pickled(given: Any, apart: bool) -> tuple[bytes, list[memoryview]]:
    stream = io.BytesIO()
    buffers: list[memoryview] = []
    _Pickler(stream, buffers if apart else None).dump(given)
    return stream.getvalue(), buffers


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    if isinstance(content, bytes):
        content = bytearray(content)  # torch wants memory that it may write to
    return torch.frombuffer(content, dtype=dtype).reshape(shape)


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _places(sizes: list[int]) -> list[int]:
    """Where each buffer begins in shared memory, and at last where the last one ends."""
    places = [0]
    for size in sizes:
        places.append(-(-(places[-1] + size) // ALIGNED) * ALIGNED)
    return places


def _anonymous_file() -> int:
    """Memory, not /dev/shm: containers give that 64 MB."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("gradus loader")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
