"""Crew: the same work on many tasks, by some processes that tell how far they are and end when their parent does."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from gradus.schema.errors import GradusError

Task = TypeVar("Task")
Result = TypeVar("Result")
Tell = Callable[[int], None]

TOLD_EVERY_SECONDS = 0.2


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def by_crew(
    work: Callable[[Task, Tell], Result], tasks: Sequence[Task], workers: int, progress: Tell
) -> Iterator[tuple[int, Result]]:
    """(task number, result) as they come. What `work` tells is passed on to `progress`; its error ends everything."""
    if workers <= 1 or len(tasks) <= 1:
        for number, task in enumerate(tasks):
            yield number, work(task, progress)
        return
    context = get_context("spawn")  # a fork would copy threads and locks of whoever calls
    crew: dict[Connection, Any] = {}
    doing: dict[Connection, int] = {}
    waiting = iter(range(len(tasks)))
    try:
        for _ in range(min(workers, len(tasks))):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, work), daemon=True)
            process.start()
            there.close()
            crew[here] = process
        for pipe in crew:
            doing[pipe] = number = next(waiting)
            pipe.send(tasks[number])
        while doing:
            for ready in wait(list(doing)):
                assert isinstance(ready, Connection), ready
                pipe = ready
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise _died(crew[pipe]) from None
                if kind == "told":
                    progress(value)
                    continue
                if kind == "error":
                    raise value
                yield doing.pop(pipe), value
                following = next(waiting, None)
                if following is not None:
                    doing[pipe] = following
                    pipe.send(tasks[following])
    finally:
        for pipe, process in crew.items():
            pipe.close()
            process.kill()
            process.join()


def _died(process: Any) -> GradusError:
    process.join(timeout=5)
    code = process.exitcode
    how = f"by signal {-code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"with code {code}"
    hint = "was there not enough memory? fewer --workers need less" if code == -signal.SIGKILL else None
    return GradusError(f"a worker process ended {how}", hint=hint)


def _serve(pipe: Connection, work: Callable[[Any, Tell], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    told, last = 0, time.monotonic()

    def tell(amount: int) -> None:
        nonlocal told, last
        told += amount
        if time.monotonic() - last >= TOLD_EVERY_SECONDS:
            pipe.send(("told", told))
            told, last = 0, time.monotonic()

    # Without the parent there is nobody to read: the pipe breaks, and this process ends.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            task = pipe.recv()
            try:
                result = ("done", work(task, tell))
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:
                result = ("error", _sendable(error))
            pipe.send(("told", told))
            told = 0
            pipe.send(result)


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a user's own exception does when it travels
        return GradusError(f"{type(error).__name__}: {error}")
    return error
