"""A signal becomes a stop request: the run saves, leaves with 75, and goes on as if nothing had happened."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from gradus_command import Gradus, committed, events, lines, rank_processes, status, trained, wait_until

STEPS = 120
SLOW = {"STEP_SECONDS": "0.05"}


def assert_each_step_was_trained_once(run: Path, steps: int) -> None:
    """Nothing is missing, nothing twice: every attempt goes on exactly where the last one was saved."""
    rows = trained(run)
    by_attempt: dict[int, list[int]] = {}
    for row in rows:
        by_attempt.setdefault(row["attempt"], []).append(row["step"])
    assert len(by_attempt) > 1
    assert [step for attempt in sorted(by_attempt) for step in by_attempt[attempt]] == list(range(1, steps + 1))


def stopped(gradus: Gradus, run_id: str, number: signal.Signals, ranks: int = 2, **changes: Any) -> dict[str, Any]:
    """A run that a signal stops after a few steps, and what the command said."""
    recipe = gradus.recipe(**{"steps": STEPS, **changes})
    process = gradus.start("train", recipe, "--nproc", str(ranks), "--run-id", run_id, "--json", **SLOW)
    run = gradus.run(run_id)
    wait_until(lambda: len(trained(run)) >= 3, process)
    process.send_signal(number)
    done = gradus.end(process)
    assert done.code == 75, done.err
    document = done.json
    assert (document["state"], document["exit_code"]) == ("stopped", 75)
    assert document["reason"] == number.name
    assert "stopping" in done.err
    return document


def evaluated_batches(notes: Path) -> int:
    """By all ranks so far."""
    return sum(path.stat().st_size for path in notes.parent.glob(f"{notes.name}*"))


def assert_saved(run: Path, step: int) -> None:
    found = status(run)
    assert (found["state"], found["step"], found["steps_total"]) == ("stopped", step, STEPS)
    assert committed(run)[-1] == step
    assert trained(run)[-1]["step"] == step
    assert not rank_processes(run)
    assert [event["step"] for event in events(run) if event["event"] == "stop-request"] == [step]


# Quickly, the other two: with a script, in test_script_stops.py.
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGUSR1, signal.SIGINT))]
)
def test_a_signal_saves_the_run_and_resume_finishes_it(gradus, number):
    run = gradus.run(number.name)
    step = stopped(gradus, number.name, number)["step"]
    assert 3 <= step < STEPS
    assert_saved(run, step)
    # The number of ranks is no part of what a run is.
    ranks = {signal.SIGTERM: "2", signal.SIGUSR1: "1", signal.SIGINT: "4"}[number]
    done = gradus("train", "--resume", str(run), "--nproc", ranks, "--json")
    assert done.code == 0, done.err
    assert (done.json["state"], done.json["step"]) == ("finished", STEPS)
    assert_each_step_was_trained_once(run, STEPS)
    assert status(run)["state"] == "finished"
    launches = [event["ranks"] for event in events(run) if event["event"] == "launch"]
    assert launches == [2, int(ranks)]


def test_the_command_says_how_to_go_on_and_a_run_is_alive_or_the_same_or_refused(gradus):
    recipe = gradus.recipe(steps=STEPS)
    run = gradus.run("refusals")
    process = gradus.start("train", recipe, "--nproc", "2", "--run-id", "refusals", STEP_SECONDS="0.2")
    wait_until(lambda: trained(run), process)
    alive = gradus("train", "--resume", str(run), "--json")
    assert alive.code == 2
    assert "the run is alive" in alive.json["error"]["message"]
    process.send_signal(signal.SIGTERM)
    done = gradus.end(process)
    assert done.code == 75, done.err
    assert "stopped on request (SIGTERM) and saved at step" in done.out
    assert "gradus train --resume runs/own/refusals" in done.out
    for field, value in (("batch", "16"), ("seed", "2"), ("data.length", "32")):
        refused = gradus("train", "--resume", str(run), "--set", f"{field}={value}", "--json")
        assert refused.code == 2
        assert refused.json["error"]["field"] == field
        assert str(refused.json["error"]["found"]) == value
    assert sorted(path.name for path in (run / "attempts").iterdir()) == ["1"]


@pytest.mark.slow
def test_a_stop_during_a_long_evaluation_is_quick_and_the_evaluation_is_done_again(gradus):
    recipe = gradus.recipe(steps=8, evaluate={"every": 4}, data={"use": "own.py:Data", "length": 40_000})
    run, notes = gradus.run("evaluating"), gradus.folder / "evaluated-by-"
    note = {"EVALUATION_SECONDS": "1", "NOTE_EVALUATED": str(notes)}
    process = gradus.start("train", recipe, "--nproc", "2", "--run-id", "evaluating", "--json", **note)
    wait_until(lambda: evaluated_batches(notes), process)  # of 4,000 samples in batches of 8, by two ranks: 500
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: (run / "control" / "stop").exists(), process)
    before = evaluated_batches(notes)
    done = gradus.end(process)
    assert (done.code, done.json["step"]) == (75, 4)
    # Each rank looks for the request once a second, which is one of its batches, and then the ranks have to agree.
    assert evaluated_batches(notes) - before <= 5 * 2
    assert not [row for row in lines(run / "metrics.jsonl") if "validation_loss" in row]
    assert committed(run) == [4]
    done = gradus("train", "--resume", str(run), "--nproc", "2", "--json")
    assert done.code == 0, done.err
    evaluated = [row for row in lines(run / "metrics.jsonl") if "validation_loss" in row]
    assert [(row["step"], row["attempt"]) for row in evaluated] == [(4, 2), (8, 2)]
    assert_each_step_was_trained_once(run, 8)


def test_a_second_interrupt_ends_the_run_at_once(gradus):
    recipe = gradus.recipe(steps=STEPS)
    run = gradus.run("at-once")
    process = gradus.start("train", recipe, "--nproc", "2", "--run-id", "at-once", "--json", STEP_SECONDS="3")
    wait_until(lambda: len(rank_processes(run)) == 2 and trained(run), process)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: (run / "control" / "stop").exists(), process)
    process.send_signal(signal.SIGINT)
    done = gradus.end(process)
    assert done.code == 1
    assert "second interrupt" in done.json["error"]["message"]
    assert not rank_processes(run)
    assert status(run)["state"] == "failed"
    assert not committed(run), "the steps of notice and the save that the first one asked for were not waited for"


def test_a_stop_before_the_first_step_is_a_stop_too(gradus):
    recipe = gradus.recipe(steps=STEPS)
    run = gradus.run("early")
    process = gradus.start("train", recipe, "--run-id", "early", "--json", STEP_SECONDS="0.2")
    wait_until(lambda: (run / "status.json").exists() and rank_processes(run), process)
    process.send_signal(signal.SIGTERM)
    done = gradus.end(process)
    assert done.code == 75, done.err
    assert committed(run) == [done.json["step"]]
    assert done.json["step"] < 10


@pytest.mark.slow
def test_now_ends_a_recipe_at_once_and_the_next_attempt_says_that_it_starts_again(gradus):
    recipe = gradus.recipe(steps=12)
    run = gradus.run("now")
    process = gradus.start("train", recipe, "--nproc", "2", "--run-id", "now", "--json", STEP_SECONDS="3")
    wait_until(lambda: len(rank_processes(run)) == 2 and trained(run), process)
    assert gradus("runs", "stop", str(run), "--now", "--json").json["ended"] is True
    done = gradus.end(process)
    assert (done.code, done.json["error"]["message"]) == (1, "ended at once by gradus runs stop --now")
    assert not rank_processes(run)
    assert (status(run)["state"], committed(run)) == ("failed", [])
    again = gradus("train", "--resume", str(run))
    assert again.code == 0, again.err
    assert "no checkpoint: starts again from step 0" in again.err
    assert [row["step"] for row in trained(run) if row["attempt"] == 2] == list(range(1, 13))
