"""Transfer: batches from host memory to a GPU while it still computes on those before."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

PINNED_AHEAD = 2  # batches in page-locked memory that wait for their copy
LOOK_SECONDS = 0.1


def mapped(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The batch with every tensor in it changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(mapped(value, change) for value in batch)
    return batch


@contextmanager
def closed_after(batches: Iterator[Any]) -> Iterator[None]:
    """Close a generator when its user is done, also by an error: whoever keeps the traceback keeps the generator."""
    try:
        yield
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


def pinned(batch: Any) -> Any:
    """In page-locked memory, from which a copy to the device goes on while this process does other things."""
    return mapped(batch, torch.Tensor.pin_memory)


def pinned_ahead(batches: Iterator[Any], device: torch.device, interrupt: Callable[[], None]) -> Iterator[Any]:
    """The batches, pinned by a thread of its own: copying megabytes would keep the step from launching kernels.

    `interrupt` ends whatever the thread may be waiting for, where nobody wants the rest.
    """
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(PINNED_AHEAD)
    unwanted = threading.Event()

    def offer(kind: str, value: Any) -> None:
        while not unwanted.is_set():
            try:
                ready.put((kind, value), timeout=LOOK_SECONDS)
                return
            except queue.Full:
                continue

    def run() -> None:
        try:
            torch.cuda.set_device(device)  # a thread begins on the first one
            with closed_after(batches):
                for batch in batches:
                    offer("batch", pinned(batch))
                    if unwanted.is_set():
                        break
            offer("end", None)
        except BaseException as error:
            offer("error", error)

    thread = threading.Thread(target=run, name="pins batches", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:
        unwanted.set()
        interrupt()
        thread.join()


def copied_ahead(
    batches: Iterator[Any], device: torch.device, timed: AbstractContextManager[object] | None = None
) -> Iterator[Any]:
    """Copy each pinned batch to the device on a stream of its own, one batch ahead of the one in use.

    The copying, and where the step has to wait for it, is done in `timed`.
    """
    timed = timed or nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copied(batch: Any) -> tuple[Any, torch.cuda.Event]:
        with timed, torch.cuda.stream(stream):
            moved = mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        return moved, done

    def arrived(batch: Any, done: torch.cuda.Event) -> Any:
        with timed:
            return _arrived(batch, done)

    ahead = None
    with closed_after(batches):
        for batch in batches:
            following = copied(batch)
            if ahead is not None:
                yield arrived(*ahead)
            ahead = following
    if ahead is not None:
        yield arrived(*ahead)


def _arrived(batch: Any, done: torch.cuda.Event) -> Any:
    current = torch.cuda.current_stream()
    current.wait_event(done)

    def used_here(tensor: torch.Tensor) -> torch.Tensor:
        # The allocator must not give this memory to the copy stream again while the step still reads it.
        tensor.record_stream(current)
        return tensor

    return mapped(batch, used_here)
