"""Launching from Python, and what a launcher does when something goes wrong on its own side."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gradus_command import RECIPE, Gradus, events, rank_processes, status, wait_until

import gradus as package
from gradus.faults.signals import SECOND_INTERRUPT, Signals
from gradus.launcher import local
from gradus.launcher.attempt import Launch, claim_run
from gradus.launcher.ending import Departure, result_of
from gradus.launcher.following import Following
from gradus.launcher.processes import attempt_processes, kill_left_over, marks
from gradus.launcher.torchrun import deaths_in_log, free_port, port_taken_in_log
from gradus.record.directory import RunDirectory
from gradus.record.lock import release
from gradus.record.outcome import write_outcome
from gradus.record.status import Status, write_status
from gradus.schema.errors import InputError


def test_train_from_python_returns_how_it_ended(gradus: Gradus):
    recipe = package.Recipe.load(gradus.folder / gradus.recipe(steps=3))
    result = package.train(recipe, nproc=1, runs=gradus.runs, run_id="python", quiet=True)
    assert (result.state, result.exit_code, result.step) == ("finished", 0, 3)
    assert [row["step"] for row in result.metrics] == [1, 2, 3]
    assert result.run.path == gradus.run("python")
    with pytest.raises(InputError, match="run directory exists"):
        package.train(recipe, nproc=1, runs=gradus.runs, run_id="python", quiet=True)


def test_a_run_whose_launcher_was_killed_before_its_first_attempt_is_not_in_the_way(tmp_path: Path):
    left = RunDirectory.create(tmp_path, "r", "mine")
    run, lock = claim_run(tmp_path, "r", "mine", None, lambda run: None)
    assert run == left
    with pytest.raises(InputError, match="is alive"):
        claim_run(tmp_path, "r", "mine", None, lambda run: None)
    release(lock)
    run.new_attempt()
    with pytest.raises(InputError, match="run directory exists"):
        claim_run(tmp_path, "r", "mine", None, lambda run: None)


def test_an_exception_in_the_launcher_leaves_no_ranks_behind(gradus: Gradus, monkeypatch: pytest.MonkeyPatch):
    run = gradus.run("launcher-fails")
    poll = Following.poll
    failed = []

    def failing(self: Following) -> None:
        if not failed and len(rank_processes(run)) == 2:
            failed.append(True)
            raise RuntimeError("out of luck")
        poll(self)

    monkeypatch.setattr(Following, "poll", failing)
    recipe = package.Recipe.load(gradus.folder / gradus.recipe(steps=10**9))
    with pytest.raises(RuntimeError, match="out of luck"):
        package.train(recipe, nproc=2, runs=gradus.runs, run_id="launcher-fails", quiet=True)
    wait_until(lambda: not rank_processes(run))
    assert status(run)["state"] == "failed"
    assert [event["event"] for event in events(run) if event["writer"].startswith("launcher")] == ["launch", "end"]


def test_a_missing_exporter_is_refused_before_anything_is_written(gradus: Gradus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    recipe = package.Recipe.load(gradus.folder / gradus.recipe(exporters=["tensorboard"]))
    with pytest.raises(InputError, match="tensorboard package"):
        package.train(recipe, runs=tmp_path / "runs", quiet=True)
    assert not (tmp_path / "runs").exists()


def test_a_stop_request_that_cannot_be_written_is_tried_again(tmp_path: Path):
    run = RunDirectory.create(tmp_path, "own")
    said: list[str] = []
    signals = Signals(run, said.append, first="SIGTERM")
    run.control.rmdir()
    signals.answer()
    signals.answer()
    assert len(said) == 1
    assert "cannot be written" in said[0]
    run.control.mkdir()
    signals.answer()
    signals.answer()
    assert run.stop_file.exists()
    assert len(said) == 2
    assert said[1] == "stopping: the run saves after a few more steps (Ctrl-C again ends it at once)"


def test_only_processes_of_this_attempt_are_left_over(tmp_path: Path):
    sleep = ["/bin/sh", "-c", "sleep 60 & wait"]  # what a rank has started itself belongs to the attempt as well
    ours, next_attempt = (subprocess.Popen(sleep, env={**os.environ, **marks(tmp_path, attempt)}) for attempt in (1, 2))
    try:
        wait_until(lambda: len(attempt_processes(tmp_path, 1)) == 2)
        killed = kill_left_over(tmp_path, 1)
        assert ours.pid in killed
        assert len(killed) == 2
        assert ours.wait(5) == -signal.SIGKILL
        assert next_attempt.poll() is None
    finally:
        kill_left_over(tmp_path, 2)
        next_attempt.wait()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


@pytest.mark.slow
def test_ranks_whose_port_was_taken_meanwhile_are_started_once_more(gradus: Gradus, monkeypatch, taken_port):
    ports = iter([taken_port, free_port()])
    monkeypatch.setattr(local, "free_port", lambda: next(ports))
    recipe = package.Recipe.load(gradus.folder / gradus.recipe(steps=3))
    result = package.train(recipe, nproc=1, runs=gradus.runs, run_id="port", quiet=True)
    assert (result.state, result.exit_code, result.step) == ("finished", 0, 3)


def test_ranks_are_started_once_more_and_not_for_ever(gradus: Gradus, monkeypatch, taken_port):
    ports = iter([taken_port, taken_port])
    monkeypatch.setattr(local, "free_port", lambda: next(ports))
    recipe = package.Recipe.load(gradus.folder / gradus.recipe(steps=3))
    result = package.train(recipe, nproc=1, runs=gradus.runs, run_id="ports", quiet=True)
    assert (result.state, result.exit_code) == ("failed", 1)
    assert result.error is not None
    assert result.error["kind"] == "launch-failed"


def test_a_rank_that_cannot_have_an_address_is_no_reason_to_start_again():
    message = "name: EADDRINUSE, message: address already in use\n"
    assert port_taken_in_log(message)
    assert not port_taken_in_log(message + TABLE.format(code=1))


@pytest.mark.parametrize("state", ["finished", "stopped"])
@pytest.mark.parametrize(
    ("return_code", "at_once", "log", "failure"),
    [
        (0, False, "", None),
        (1, False, "TABLE", "rank 3 on node8 was killed by SIGKILL"),
        (1, False, "", "the ranks left with exit code 1 after rank 0 had"),
        (1, True, "", None),  # a second Ctrl-C when all was done already
    ],
)
def test_an_ending_counts_only_if_all_ranks_left_well(tmp_path, state, return_code, at_once, log, failure):
    run = RunDirectory.create(tmp_path, "own")
    launch = Launch(run, run.new_attempt(), package.Recipe.from_document(RECIPE), ranks=2, cores=2)
    ending = {"state": state, "exit_code": 75 if state == "stopped" else 0, "step": 6, "loss": 0.5, "reason": None}
    write_outcome(run, launch.attempt, ending)
    write_status(run, Status(state, 6, attempt=launch.attempt))
    path = run.log_path(launch.attempt, socket.gethostname())
    path.parent.mkdir(exist_ok=True)
    path.write_text(log and TABLE.format(code=-9))
    result = result_of(launch, Departure(return_code, SECOND_INTERRUPT if at_once else None))
    assert (result.step, result.loss) == (6, 0.5)
    if failure is None:
        assert (result.state, result.exit_code, result.error) == (state, ending["exit_code"], None)
    else:
        assert (result.state, result.exit_code) == ("failed", 1)
        assert result.error is not None
        assert result.error["message"].startswith(failure)
    assert status(run.path)["state"] == result.state


TABLE = """\
============================================================
gradus.training.rank FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_00:00:02
  host      : node7
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 10)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:01
  host      : node8
  rank      : 3 (local_rank: 1)
  exitcode  : {code} (pid: 11)
============================================================
"""


@pytest.mark.parametrize(
    ("code", "words"), [(-9, "was killed by SIGKILL"), (-11, "was killed by SIGSEGV"), (7, "code 7")]
)
def test_the_first_rank_that_died_is_found_in_torchruns_table(code, words):
    first, other = deaths_in_log(TABLE.format(code=code))
    assert (first.rank, first.node, first.exit_code) == (3, "node8", code)
    assert (other.rank, other.node, other.exit_code) == (0, "node7", -15)
    message = first.document()["message"]
    assert message.startswith("rank 3 on node8 ")
    assert words in message


def test_a_log_without_a_table_names_nobody():
    assert deaths_in_log("rank 3 was here\nexitcode 9\n") == []


@pytest.mark.parametrize("logged", [0, 30])
def test_a_run_that_was_killed_got_as_far_as_it_logged(tmp_path, logged):
    """The last sign of life of rank 0 is a few steps older."""
    run = RunDirectory.create(tmp_path, "own")
    launch = Launch(run, run.new_attempt(), package.Recipe.from_document(RECIPE), ranks=2, cores=2)
    write_status(run, Status("running", 23, 200, attempt=launch.attempt))
    rows = [{"step": step, "attempt": launch.attempt, "loss": 1.0} for step in range(1, logged + 1)]
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = run.log_path(launch.attempt, socket.gethostname())
    path.parent.mkdir(exist_ok=True)
    path.write_text(TABLE.format(code=-9))
    result = result_of(launch, Departure(1))
    assert (result.state, result.step, status(run.path)["step"]) == ("failed", max(logged, 23), max(logged, 23))
