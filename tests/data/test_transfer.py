"""Transfer: the thread that pins batches keeps their order, passes errors on, and ends when nobody wants the rest.

Pinned memory needs a GPU, which the machines that test have not: copying it is left out here.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradus.data import transfer
from gradus.data.transfer import mapped, pinned_ahead
from gradus.data.workers import WorkerFailed, Workers


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(transfer, "pinned", lambda batch: batch)


def pinning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pins batches"]


def ahead(batches: Iterator[Any], interrupt: Any = lambda: None) -> Iterator[Any]:
    return pinned_ahead(batches, torch.device("cuda", 0), interrupt)


def test_batches_come_in_their_order_and_the_thread_ends() -> None:
    assert list(ahead(iter(range(50)))) == list(range(50))
    assert not pinning_threads()


def test_an_error_comes_after_the_batches_before_it() -> None:
    def broken() -> Iterator[int]:
        yield from range(3)
        raise ValueError("no more")

    found: list[int] = []
    with pytest.raises(ValueError, match="no more"):
        found.extend(ahead(broken()))
    assert found == [0, 1, 2]
    assert not pinning_threads()


def test_when_nobody_wants_the_rest_the_batches_are_closed() -> None:
    closed = []

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    batches = ahead(endless())
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert closed == [True]
    assert not pinning_threads()


def test_a_thread_that_waits_for_a_slow_worker_is_interrupted() -> None:
    workers: Workers[float] = Workers(time.sleep, 2)
    batches = ahead(workers.answers([0.0, 3600.0, 3600.0]), workers.kill)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not pinning_threads(), "it would have waited for an hour"
    workers.close()
    assert {worker.process.exitcode for worker in workers._workers} == {-signal.SIGKILL}


def test_a_dead_worker_is_told_through_the_thread() -> None:
    def broken(number: int) -> int:
        raise SystemExit(3)

    workers: Workers[int] = Workers(broken, 1)
    with pytest.raises(WorkerFailed, match="exit code 3"):
        list(ahead(workers.answers(range(3)), workers.kill))
    workers.close()


def test_every_tensor_of_a_batch_is_mapped_and_nothing_else() -> None:
    batch = {"a": torch.ones(2), "b": [torch.ones(1), "text"], "c": (3, None)}
    found = mapped(batch, lambda tensor: tensor + 1)
    assert torch.equal(found["a"], torch.full((2,), 2.0))
    assert found["b"][1] == "text"
    assert found["c"] == (3, None)
