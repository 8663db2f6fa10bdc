"""Stop requests: a file is enough, rank 0 alone looks for it, and looks rarely."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fault_cases import told_by_rank_0
from pool import Pool

from gradus.faults.signals import Signals
from gradus.faults.stop_request import StopRequest
from gradus.parallel.world import alone
from gradus.record.directory import RunDirectory
from gradus.record.stop import request_stop, requested_stop

ALONE = alone(torch.device("cpu"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time as the test says."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_without_a_file_nothing_is_seen(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path / "stop", ALONE)
    assert not stop.seen()
    assert stop.reason is None


def test_the_file_is_looked_for_at_most_once_a_second(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[float] = []
    read = Path.read_text

    def watched(path: Path) -> str:
        looked.append(clock[0])
        return read(path)

    monkeypatch.setattr(Path, "read_text", watched)
    stop = StopRequest(tmp_path / "stop", ALONE)
    for _ in range(1000):
        assert not stop.seen()
        clock[0] += 0.01
    assert len(looked) == 10
    assert min(later - earlier for earlier, later in pairwise(looked)) >= 1.0


def test_a_request_is_seen_within_a_second_of_its_appearance(tmp_path: Path, clock: list[float]) -> None:
    stop = StopRequest(tmp_path / "stop", ALONE)
    assert not stop.seen()
    (tmp_path / "stop").touch()
    clock[0] += 0.5
    assert not stop.seen()
    clock[0] += 0.5
    assert stop.seen()


def test_a_request_says_why(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")
    request_stop(run, "SIGTERM")
    stop = StopRequest(run.stop_file, ALONE)
    assert stop.seen()
    assert stop.reason == "SIGTERM"


@pytest.mark.parametrize("content", ["", "please stop", "[]", "null", '{"reason": "x"', "\udcff"])
def test_a_file_of_any_content_is_a_request(tmp_path: Path, content: str) -> None:
    (tmp_path / "stop").write_bytes(content.encode(errors="surrogateescape"))
    stop = StopRequest(tmp_path / "stop", ALONE)
    assert stop.seen()
    assert stop.reason == "stop file"


def test_what_is_to_end_at_once_is_not_saved_unless_nobody_ends_it(run: RunDirectory, clock: list[float]) -> None:
    """A rank that saved and left at once would be faster than the launcher that is to kill it."""
    request_stop(run, "gradus runs stop --now", now=True)
    stop = StopRequest(run.stop_file, ALONE)
    for _ in range(10):
        assert not stop.seen()
        clock[0] += 1.0
    clock[0] += 10.0
    assert stop.seen()


def test_a_request_once_seen_stays_seen(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    stop = StopRequest(tmp_path / "stop", ALONE)
    assert stop.seen()
    (tmp_path / "stop").unlink()
    assert stop.seen()


def test_other_ranks_are_told_by_rank_0(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(3, told_by_rank_0, str(tmp_path)) == [(False, True, "deadline")] * 3


def test_a_signal_does_not_take_the_place_of_what_a_person_has_asked_for(run: RunDirectory) -> None:
    """Else a run that is to be held, and is preempted meanwhile, would be queued again."""
    request_stop(run, "gradus runs stop")
    Signals(run, lambda text: None, first="SIGTERM").answer()
    assert requested_stop(run) == "gradus runs stop"
    run.stop_file.unlink()
    Signals(run, lambda text: None, first="SIGTERM").answer()
    assert requested_stop(run) == "SIGTERM"
