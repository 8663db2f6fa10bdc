import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone

from gradus.record.status import Heartbeat, Status, read_status, shown_state, write_status, writer_is_gone


def test_a_status_comes_back_as_it_was_written(run):
    updated_at = datetime(2026, 3, 1, 12, 0, 0, 125000, tzinfo=timezone.utc)
    status = Status("failed", step=7, steps_total=9, attempt=2, goodput=0.9, last_error="boom", updated_at=updated_at)
    assert write_status(run, status) is None
    assert read_status(run) == status
    assert [path.name for path in run.path.iterdir() if path.is_file()] == ["status.json"]


def test_no_status_or_a_damaged_one_reads_as_none(run):
    assert read_status(run) is None
    run.status_path.write_text('{"state": "runn')
    assert read_status(run) is None


def test_only_a_running_run_can_be_lost_and_only_after_a_minute():
    status = Status("running")
    assert shown_state(status, status.updated_at + timedelta(seconds=59)) == "running"
    assert shown_state(status, status.updated_at + timedelta(seconds=61)) == "lost"
    assert shown_state(replace(status, state="finished"), status.updated_at + timedelta(days=1)) == "finished"


def test_a_status_that_cannot_be_written_is_a_problem_not_an_exception(run):
    run.status_path.mkdir()
    assert "cannot write" in write_status(run, Status("running"))


def test_the_heartbeat_keeps_a_silent_run_fresh(run):
    heartbeat = Heartbeat(run, Status("running"), at_most_every_seconds=0.02, at_least_every_seconds=0.1)
    first = wait_for(lambda: read_status(run))
    wait_for(lambda: read_status(run).updated_at > first.updated_at)
    heartbeat.close()
    assert read_status(run).pid == os.getpid()


def test_constant_updates_are_a_few_writes_and_the_last_one_counts(run):
    began = time.monotonic()
    heartbeat = Heartbeat(run, Status("running"), at_most_every_seconds=0.2)
    wait_for(lambda: read_status(run))
    writes, step = set(), 0
    while len(writes) < 3:
        step += 1
        heartbeat.update(step=step)
        writes.add(run.status_path.stat().st_mtime_ns)
    assert len(writes) <= 1 + (time.monotonic() - began) / 0.2
    assert step > 100, "many changes, few writes"
    wait_for(lambda: read_status(run).step == step)
    heartbeat.close()


def test_closing_writes_the_final_state_at_once(run):
    heartbeat = Heartbeat(run, Status("running"), at_most_every_seconds=3600, at_least_every_seconds=7200)
    assert heartbeat.close(state="finished", step=200) is None  # or the next write is an hour away
    assert (read_status(run).state, read_status(run).step) == ("finished", 200)


def test_a_heartbeat_that_cannot_write_says_so_once(run):
    run.status_path.mkdir()
    problems: list[str] = []
    heartbeat = Heartbeat(
        run, Status("running"), problems.append, at_most_every_seconds=0.01, at_least_every_seconds=0.02
    )
    time.sleep(0.2)
    assert "cannot write" in heartbeat.close()
    assert len(problems) == 1


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError("did not happen in time")


def test_a_process_that_ended_is_gone_also_if_nobody_asked_how(run):
    """As in a container whose first process never asks."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    status = Status("running", 1, attempt=1, host=socket.gethostname(), pid=child.pid)
    assert not writer_is_gone(status)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    os.kill(child.pid, 0)  # it still has its number
    assert writer_is_gone(status)
    child.communicate()
