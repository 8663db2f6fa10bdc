"""How many loader workers a rank needs, from a short measurement on the micro-batches that it will train on first."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

from gradus.data.workers import Workers
from gradus.record.format import count_text

MOST = 16  # planner/memory/host_memory.py counts with it
MEASURED = 4  # micro-batches at most, after one that opens files and fills caches
MEASURING_SECONDS = 1.0  # no further micro-batch is begun after this
# Below this, a worker would not pay: to hand over 128 pictures of 64 × 64 pixels takes 0.27 ms of processor time, both
# sides together (400 in a row, best of five, on one core of an EPYC, November 2026).
CHEAP_SECONDS = 0.001
WANTED_SECONDS = 0.01  # workers are enough to have a micro-batch ready so often; nobody knows yet how long a step takes
WAITING = (
    0.5  # of the time spent waiting, for a disk or a network, makes a worker worth its while without a core of its own
)


class WorkerCount(NamedTuple):
    workers: int
    reason: str


def worker_count(fetch: Callable[[Any], Any], requests: Iterator[Any], cores: int) -> WorkerCount:
    """As many as keep up, never more than there are cores; one core is left to the rank itself.

    A worker measures: a dataset that opens files when it is first asked must not do so in the rank, where all workers
    would inherit them.
    """

    def timed(request: Any) -> tuple[float, float]:
        clock, processor = time.perf_counter(), time.process_time()
        fetch(request)
        return time.perf_counter() - clock, time.process_time() - processor

    begun = time.perf_counter()

    def while_time_is_left() -> Iterator[Any]:
        for number, request in enumerate(itertools.islice(requests, 1 + MEASURED)):
            if number > 1 and time.perf_counter() - begun > MEASURING_SECONDS:
                return
            yield request

    with closing(Workers(timed, 1)) as one:
        found = list(one.answers(while_time_is_left(), ahead=1))
    if not found:
        return WorkerCount(0, "no worker: there is nothing to load")
    clock, processor = min(found[1:] or found)
    return decided(clock, processor, cores)


def decided(clock_seconds: float, processor_seconds: float, cores: int) -> WorkerCount:
    """The number, from what fetching one micro-batch took."""
    took = f"a micro-batch is fetched in {1000 * clock_seconds:.3g} ms by one worker"
    if clock_seconds < CHEAP_SECONDS:
        return WorkerCount(0, f"no worker: {took}, less than handing it over is worth")
    waits = processor_seconds < (1 - WAITING) * clock_seconds
    free = cores if waits else cores - 1
    needed = math.ceil(clock_seconds / WANTED_SECONDS)
    workers = min(needed, free, MOST)
    of = f"{count_text(cores, 'core')} of this rank"
    if workers == 0:
        return WorkerCount(0, f"no worker: {took}, and the {of} is for the rank itself")
    waiting = ", most of it waiting" if waits else ""
    for_steps = f"enough for one every {1000 * WANTED_SECONDS:g} ms (how long a step takes is not known yet)"
    enough = for_steps if workers == needed else f"as many as the {of} allow"
    return WorkerCount(workers, f"{count_text(workers, 'worker')}: {took}{waiting}; {enough}")
