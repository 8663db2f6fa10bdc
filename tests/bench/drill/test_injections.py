"""What a drill does, it does to the run that was meant, and it takes back what is not to last."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gradus.bench.drill import injections
from gradus.bench.drill.drilling import drill_recipe
from gradus.bench.drill.injections import KINDS, Target, inject
from gradus.launcher.processes import marks
from gradus.record.directory import RunDirectory
from gradus.record.status import Status, write_status
from gradus.schema.errors import GradusError, InputError


@pytest.fixture
def live(run: RunDirectory) -> RunDirectory:
    run.new_attempt()
    write_status(run, Status("running", 3, attempt=1))
    return run


@pytest.fixture
def processes(live: RunDirectory) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Of the attempt; one to begin with."""
    started = [process_of(live)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def process_of(run: RunDirectory, **more: Any) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **marks(run.path, 1)},
        **more,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def limits_of(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    return [resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[0] for process in processes]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_disk_is_full_for_a_while_and_not_for_ever(live, processes, monkeypatch, interrupted):
    full: list[int] = []

    def sleep(seconds: float) -> None:
        full.extend(limits_of(processes))
        # As a rank would start it now: it has its parent's limit.
        limit = (injections._SMALL_FILE_BYTES, resource.RLIM_INFINITY)
        processes.append(process_of(live, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)))
        if interrupted:
            raise KeyboardInterrupt

    before = limits_of(processes)
    monkeypatch.setattr(injections.time, "sleep", sleep)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            inject("disk-full", Target(live))
    else:
        assert "no file could grow" in inject("disk-full", Target(live)).what
    assert full == [injections._SMALL_FILE_BYTES]
    assert limits_of(processes) == before * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_not_running_is_left_alone(live, kind):
    write_status(live, Status("finished", 3, attempt=1))
    with pytest.raises(InputError, match="the run is finished"):
        inject(kind, Target(live))


def test_the_newest_checkpoint_is_damaged_only_where_there_is_another_one(live):
    with pytest.raises(InputError, match="has 0 checkpoints"):
        inject("corrupt-checkpoint", Target(live))


def test_a_test_run_that_cannot_start_says_why(tmp_path):
    launch = ("train", "--runs", str(tmp_path / "runs"))
    with pytest.raises(GradusError, match=r"the test run did not start: .*no-such\.yaml") as caught:
        drill_recipe("no-such.yaml", "hang", rank=None, launch=launch, patience_seconds=60, say=lambda text: None)
    assert not (tmp_path / "runs").exists()
    assert "}" not in caught.value.message
