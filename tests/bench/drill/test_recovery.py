"""By what a drill knows that a run has got over it."""

from __future__ import annotations

import json
import time
from pathlib import Path

from gradus.bench.drill.injections import Injected
from gradus.bench.drill.recovery import judged, observe
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter
from gradus.record.status import Status, write_status


def log_step(run: RunDirectory, attempt: int, step: int) -> None:
    with run.metrics_path.open("a") as file:
        file.write(json.dumps({"step": step, "attempt": attempt, "loss": 1.0}) + "\n")


def started_again(folder: Path, reached: int) -> tuple[RunDirectory, Injected]:
    """A run that was preempted at step 7, made some more steps, and has begun its second attempt."""
    run = RunDirectory.create(folder, "drilled")
    write_status(run, Status("running", attempt=2))
    injected = Injected("preempt", "SIGTERM", time.time(), step=7, attempt=1)
    for step in range(1, reached + 1):
        log_step(run, 1, step)
    events = EventWriter(run, "rank-0-attempt-2")
    events.write("start", attempt=2, step=reached)
    events.close()
    return run, injected


def test_steps_on_the_way_to_a_stop_are_no_recovery_but_the_first_new_one_of_the_next_attempt_is(
    tmp_path: Path,
) -> None:
    """A run that is asked to stop at step 7 makes some more steps first, which it does not lose."""
    run, injected = started_again(tmp_path, reached=12)
    assert judged(run, injected) is None
    log_step(run, 2, 13)
    recovery = judged(run, injected)
    assert recovery is not None
    assert (recovery.recovered, recovery.lost_steps) == (True, 0)


def test_a_first_step_that_comes_while_events_are_told_has_its_time(tmp_path: Path) -> None:
    run, injected = started_again(tmp_path, reached=7)
    recovery = observe(run, injected, 60, say=lambda line: log_step(run, 2, 8))
    assert recovery.recovered
    assert recovery.seconds_to_first_step is not None
    assert recovery.seconds_to_first_step == recovery.seconds_to_catch_up
