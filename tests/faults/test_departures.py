"""Ranks that leave a loop find out whether the others leave it as well: here two of them, in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore, Store, TCPStore

from gradus.faults import departures
from gradus.faults.departures import Departures, LeftAlone
from gradus.faults.rank_report import Exchange, RankReport
from gradus.faults.watchdog import is_lost_peer
from gradus.faults.whereabouts import Phase
from gradus.parallel.world import World, alone


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "ALONE_SECONDS", 0.4)
    monkeypatch.setattr(departures, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(departures, "_POLL_SECONDS", 0.01)


def world(rank: int, store: Store) -> World:
    return World(rank=rank, local_rank=rank, size=2, device=torch.device("cpu"), store=store)


def test_who_is_the_last_to_come_to_the_end_tells_nobody_and_does_not_fail() -> None:
    """Without torchrun, rank 0 keeps the store in its own process, and takes it along."""
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", kept.port, is_master=False, wait_for_workers=False)
    early, late = Departures(world(0, kept)), Departures(world(1, client))
    early.tell(5)
    late.tell(5)
    del early, kept
    late.tell(6)
    with pytest.raises(RuntimeError):  # who waits for others does want to know
        late.meet(7)


@contextmanager
def reporting(store: Store, phase: Phase, *, waits: bool) -> Iterator[None]:
    """Inside, rank 0 says all the while that it is there."""
    over, began, exchange = threading.Event(), time.monotonic(), Exchange(store, 2)

    def say() -> None:
        report = RankReport(0, 0, "node", 1, step=5, moves=9, phase=phase, phase_seconds=1.0)
        while not over.is_set():
            waited = time.monotonic() - began if waits else None
            report = replace(report, number=report.number + 1, waiting_seconds=waited)
            exchange.say(report)
            time.sleep(0.05)

    thread = threading.Thread(target=say)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def met(store: Store, *steps: int) -> list[Exception | None]:
    """How it went for each rank that left after so many steps."""
    found: list[Exception | None] = [None] * len(steps)

    def leave(rank: int) -> None:
        try:
            Departures(world(rank, store)).meet(steps[rank])
        except LeftAlone as error:
            found[rank] = error

    threads = [threading.Thread(target=leave, args=(rank,)) for rank in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return found


def test_a_world_of_one_waits_for_nobody() -> None:
    Departures(alone(torch.device("cpu"))).meet(3)


def test_ranks_that_leave_after_the_same_step_go_on_together() -> None:
    assert met(HashStore(), 5, 5) == [None, None]


def test_ranks_that_leave_after_different_steps_are_told_so() -> None:
    told = [str(error) for error in met(HashStore(), 6, 5)]
    assert told == [
        "rank 0 left the loop after 6 steps while rank 1 left it after 5 steps",
        "rank 1 left the loop after 5 steps while rank 0 left it after 6 steps",
    ]


def test_a_rank_that_waits_for_others_and_has_not_left_goes_on_without_the_one_that_did() -> None:
    store = HashStore()
    with reporting(store, "forward-backward", waits=True), pytest.raises(LeftAlone) as raised:
        Departures(world(1, store)).meet(5)
    assert raised.value.message.startswith("rank 1 left the loop after 5 steps while rank 0 goes on, and waits")


@pytest.mark.parametrize(("phase", "waits"), [("own-code", False), ("data", False), ("after-loop", True)])
def test_a_rank_that_is_slow_is_waited_for(phase: Phase, waits: bool) -> None:
    store = HashStore()
    late = threading.Timer(1.5, lambda: Departures(world(0, store)).tell(5))
    late.start()
    began = time.monotonic()
    with reporting(store, phase, waits=waits):
        Departures(world(1, store)).meet(5)
    assert time.monotonic() - began > 1


def test_a_rank_that_has_ended_is_a_lost_peer_whose_own_words_count() -> None:
    store = HashStore()
    with reporting(store, "over", waits=False), pytest.raises(DistNetworkError) as raised:
        Departures(world(1, store)).meet(5)
    assert is_lost_peer(raised.value)


def test_a_second_loop_is_left_anew() -> None:
    store = HashStore()
    first, second = Departures(world(0, store)), Departures(world(1, store))
    for step in (5, 9):
        first.tell(step)
        second.meet(step)
    with reporting(store, "forward-backward", waits=True), pytest.raises(LeftAlone):
        second.meet(9)
