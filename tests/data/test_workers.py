"""Workers: answers in order, memory that is used again but never under anybody's eyes, and an end that is told."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import gradus.data.workers as its_module
from gradus.data.workers import SLOTS, WorkerFailed, Workers
from gradus.schema.errors import InputError


@contextmanager
def workers(work: Callable[[Any], Any], count: int = 2, **options: Any) -> Iterator[Workers[Any]]:
    crew: Workers[Any] = Workers(work, count, **options)
    try:
        yield crew
    finally:
        crew.close()


def image(number: int) -> dict[str, Any]:
    return {"image": torch.full((40, 50), number, dtype=torch.int32), "number": number}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_answers_come_in_the_order_of_the_tasks(count: int) -> None:
    def uneven(number: int) -> int:
        time.sleep(0.01 if number % 4 == 0 else 0)
        return number * number

    with workers(uneven, count) as crew:
        assert list(crew.answers(range(30))) == [number * number for number in range(30)]


def test_any_kind_of_answer_arrives_as_it_was() -> None:
    answers = [
        torch.arange(6000, dtype=torch.bfloat16).reshape(60, 100),
        torch.arange(6000).reshape(60, 100).t(),  # not contiguous
        torch.tensor(3),
        torch.empty(0, 4),
        torch.rand(3, 700) > 0.5,
        np.arange(5000, dtype=np.uint16).reshape(50, 100),
        {"nested": [(torch.ones(500), "text"), None], 3: {4, 5}},
        np.array(["a", "bc"]),
    ]
    with workers(answers.__getitem__) as crew:
        found = list(crew.answers(range(len(answers))))
    for number in (0, 1, 2, 3, 4):
        assert torch.equal(found[number], answers[number])
        assert found[number].dtype == answers[number].dtype
    assert np.array_equal(found[5], answers[5])
    assert torch.equal(found[6]["nested"][0][0], torch.ones(500))
    assert found[6]["nested"][0][1:] == ("text",)
    assert found[6][3] == {4, 5}
    assert found[7].tolist() == ["a", "bc"]


def test_batches_that_somebody_keeps_are_not_written_over() -> None:
    count = 8 * SLOTS
    with workers(image) as crew:
        kept = list(crew.answers(range(count)))
    assert [int(each["image"].unique()) for each in kept] == list(range(count))
    kept[0]["image"][0, 0] = -1  # may be written to
    assert kept[1]["image"][0, 0] == 1


def test_a_part_of_a_batch_keeps_its_memory() -> None:
    with workers(image, 1) as crew:
        parts = [each["image"][3:5, ::2] for each in crew.answers(range(4 * SLOTS))]
        gc.collect()
        assert [int(part.unique()) for part in parts] == list(range(4 * SLOTS))


def test_memory_is_used_again_and_grows_with_the_batches() -> None:
    def growing(number: int) -> torch.Tensor:
        return torch.full((1000 * (1 + number // 20),), number)

    with workers(growing, 1) as crew:
        places = set()
        for number, tensor in enumerate(crew.answers(range(60))):
            assert tensor.tolist() == [number] * (1000 * (1 + number // 20))
            places.add(tensor.data_ptr())
    assert len(places) <= 3 * SLOTS, "each slot is mapped at most once for every size"


def test_work_that_raises_is_raised_here_with_the_workers_traceback() -> None:
    def broken(number: int) -> int:
        if number == 5:
            raise KeyError("no such column")
        return number

    found = []
    with workers(broken) as crew, pytest.raises(KeyError, match="no such column") as caught:
        found.extend(crew.answers(range(10)))
    assert found == [0, 1, 2, 3, 4][: len(found)]
    assert "in broken" in str(caught.value.__cause__)


def test_bad_input_arrives_with_its_hint() -> None:
    def refused(number: int) -> int:
        raise InputError("data.path: not there", hint="look elsewhere", field="data.path")

    with workers(refused) as crew, pytest.raises(InputError, match="not there") as caught:
        list(crew.answers(range(3)))
    assert caught.value.hint == "look elsewhere"


def test_an_exception_that_cannot_travel_is_told_in_words() -> None:
    class Local(Exception):
        pass

    def broken(number: int) -> int:
        raise Local("only known here")

    with workers(broken) as crew, pytest.raises(RuntimeError, match="Local: only known here"):
        list(crew.answers(range(3)))


def killed_by(number: int) -> Callable[[], None]:
    def kill() -> None:
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None  # pytest's own would print
        os.kill(os.getpid(), number)

    return kill


def ending(how: Callable[[], None], at: int = 7) -> Callable[[int], int]:
    def work(number: int) -> int:
        if number == at:
            how()
        return number

    return work


@pytest.mark.parametrize(
    ("how", "told", "hint"),
    [
        (killed_by(signal.SIGKILL), "was killed by SIGKILL", "fewer workers (plan.workers=1)"),
        (killed_by(signal.SIGSEGV), "was killed by SIGSEGV", "native code"),
        (killed_by(signal.SIGBUS), "was killed by SIGBUS", "mapped file"),
        (lambda: os._exit(3), "ended itself with exit code 3", "plan.workers=0"),
        (lambda: os._exit(0), "ended itself with exit code 0", "plan.workers=0"),
    ],
)
def test_a_worker_that_dies_is_told_at_once_with_what_it_was_doing(
    how: Callable[[], None], told: str, hint: str
) -> None:
    with workers(ending(how), describe=lambda number: f"task {number}") as crew:
        pid = crew._workers[1].process.pid
        with pytest.raises(WorkerFailed) as caught:
            list(crew.answers(range(40)))
    assert caught.value.message == f"loader worker 1 of 2 (pid {pid}) {told} while fetching task 7"
    assert hint in str(caught.value.hint)
    assert caught.value.exit_code == 1


def test_a_worker_that_is_killed_from_outside_is_noticed_while_another_is_waited_for() -> None:
    def slow(number: int) -> int:
        time.sleep(3600 if number == 0 else 0)
        return number

    with workers(slow) as crew:
        answers = crew.answers(range(10))
        os.kill(int(crew._workers[1].process.pid or 0), signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="loader worker 1 of 2"):
            next(answers)  # worker 0 sleeps on, and is not waited for


def test_a_worker_that_hangs_is_told_after_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradus.data.workers.TELLING_SECONDS", 30.0)  # a busy machine is no failure
    message = r"no answer for 4 s \(data\.timeout\) while fetching 7"
    hanging = workers(ending(lambda: time.sleep(60)), timeout_seconds=4)
    with hanging as crew, pytest.raises(WorkerFailed, match=message) as caught:
        list(crew.answers(range(40)))
    assert f'File "{__file__}", line ' in str(caught.value.hint), "its own line is told"
    assert "in work" in caught.value.details["traceback"]


def test_a_stop_request_does_not_reach_workers() -> None:
    with workers(lambda number: number) as crew:
        answers = crew.answers(range(400))
        found = [next(answers)]
        for worker in crew._workers:
            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(int(worker.process.pid or 0), each)
        assert found + list(answers) == list(range(400))


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        found.append(pid)
    return found


@pytest.mark.parametrize("at_once", [True, False])
def test_nothing_is_left_of_workers_that_were_closed(at_once: bool) -> None:
    before = set(os.listdir("/proc/self/fd"))
    crew: Workers[int] = Workers(lambda number: number, 2)
    pids = [int(worker.process.pid or 0) for worker in crew._workers]
    list(crew.answers(range(5)))
    crew.close(at_once)
    crew.close()
    del crew
    gc.collect()
    assert not alive(pids)
    assert set(os.listdir("/proc/self/fd")) <= before


def pids_of_ended_process(tasks: list[int], end: Callable[[], Any]) -> list[int]:
    """Of the workers of a process that has ended: this way, with these tasks (seconds of sleep) given out."""
    context = mp.get_context("fork")
    here, there = context.Pipe()

    def run() -> None:
        crew: Workers[float] = Workers(time.sleep, 2)
        next(crew.answers(tasks))
        there.send([worker.process.pid for worker in crew._workers])
        end()

    process = context.Process(target=run)
    process.start()
    pids: list[int] = here.recv()
    deadline = time.monotonic() + 60
    while (waits := process.is_alive()) and time.monotonic() < deadline:  # join would wait for its children, too
        time.sleep(0.02)
    if waits:
        for pid in [*pids, process.pid]:
            os.kill(pid, signal.SIGKILL)
    assert not waits, "it waits for its workers"
    return pids


@pytest.mark.parametrize("end", [lambda: None, lambda: sys.exit(4)])
def test_a_process_can_end_while_its_workers_are_at_work(end: Callable[[], Any]) -> None:
    """They ignore the SIGTERM that multiprocessing sends at exit, and it would wait for them."""
    assert not alive(pids_of_ended_process([0, 0, 600, 600], end))


def test_workers_of_a_killed_process_end_by_themselves() -> None:
    """Even if another child of that process lives on, with the ends of their pipes open."""

    here, there = os.pipe()

    def end() -> None:
        if os.fork() == 0:
            os.write(there, str(os.getpid()).encode())
            time.sleep(600)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    pids = pids_of_ended_process([0, 0, 0], end)
    other = int(os.read(here, 20))
    try:
        deadline = time.monotonic() + 60
        while alive(pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not alive(pids)
        assert alive([other])
    finally:
        os.kill(other, signal.SIGKILL)
        os.close(here)
        os.close(there)


def test_closing_at_the_end_of_a_process_needs_nothing_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that somebody keeps is closed when Python has emptied the modules."""
    with workers(abs, 1) as crew, monkeypatch.context() as patched:
        patched.setattr(crew, "_process_is_ending", lambda: True)
        for name in vars(its_module).copy():
            if not name.startswith("__"):
                patched.setattr(its_module, name, None)
        crew.close()
