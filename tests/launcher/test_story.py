"""The story of a run says how it is, why, and what to do next; a run that is gone without a word is lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from datetime import datetime, timedelta, timezone

import pytest

from gradus.cli.runs import RunsOptions, runs_command
from gradus.launcher.job_place import JobPlace, write_place
from gradus.launcher.ledger import settle
from gradus.launcher.script import COMMAND_FILE
from gradus.launcher.slurm.commands import JobState
from gradus.launcher.slurm.queue import Queue
from gradus.launcher.story import story_of
from gradus.launcher.verdict import Ended
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter
from gradus.record.status import Status, write_status
from gradus.schema.errors import InputError


def dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_local_run_whose_process_is_gone_is_lost_and_can_go_on(run: RunDirectory) -> None:
    run.new_attempt()
    write_status(run, Status("running", 12, 100, attempt=1, host=socket.gethostname(), pid=dead_process()))
    story = story_of(run)
    assert story.state == "lost"
    assert "1 attempt, at step 12 of 100, nothing is saved" in story.lines
    assert story.next_steps == [f"gradus train --resume {run.name}/{run.id} goes on from the beginning"]


def test_a_run_that_is_alive_is_told_so(run: RunDirectory) -> None:
    run.new_attempt()
    write_status(run, Status("running", 12, attempt=1, host=socket.gethostname(), pid=os.getpid()))
    story = story_of(run)
    assert story.state == "running"
    assert any("gradus runs logs" in line for line in story.next_steps)


def test_what_the_ledger_decided_is_told_attempt_by_attempt(run: RunDirectory) -> None:
    for attempt in (1, 2):
        run.new_attempt()
        ended = Ended(
            attempt,
            "failed",
            1,
            step_reached=7,
            error_kind="exception",
            error_message="the cat is on the keyboard\nsecond line",
            error_signature="cat",
            rank=1,
            node="n2",
            nodes=("n1", "n2"),
        )
        settle(run, ended, retries=3)
    write_status(run, Status("failed", 7, attempt=2))
    story = story_of(run)
    told = [line for line in story.lines if line.startswith("attempt ")]
    assert len(told) == 2
    assert told[0].startswith("attempt 1 on n1,n2: failed at step 7 (the cat is on the keyboard); again: ")
    assert "; give-up: " in told[1]
    assert story.next_steps[0].startswith("mend what is told above")
    document = story.document()
    assert [line["decision"] for line in document["attempts"]] == ["again", "give-up"]


def test_the_last_words_of_a_job_that_never_made_an_attempt_are_told(run: RunDirectory) -> None:
    run.job.mkdir()
    (run.job / "12.out").write_text("bash: module: command not found\n")
    write_status(run, Status("failed", last_error="the job ended"))
    assert "  bash: module: command not found" in story_of(run).lines


def test_the_verbs_are_checked_and_the_nearest_is_named(run: RunDirectory) -> None:
    root = str(run.path.parent.parent)
    with pytest.raises(InputError, match="did you mean 'logs'"):
        runs_command(RunsOptions(("log", run.id), root))
    with pytest.raises(InputError, match="--follow: found it without logs"):
        runs_command(RunsOptions((run.id,), root, follow=True))
    write_status(run, Status("stopped"))
    with pytest.raises(InputError, match="is not running: stopped"):
        runs_command(RunsOptions(("stop", run.id), root))


def test_logs_and_why_are_printed(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(run.path.parent.parent)
    run.new_attempt()
    for node in ("n1", "n2"):
        run.log_path(1, node).write_text(f"[rank0]: on {node}\n")
    run.log_path(1, "n3").write_text("")
    run.job.mkdir()
    (run.job / "7.out").write_text("step 3/3  loss 0.1\n")
    write_status(run, Status("finished", 3, attempt=1, updated_at=datetime.now(timezone.utc) - timedelta(days=1)))
    assert runs_command(RunsOptions(("logs", run.id), root)) == 0
    printed = capsys.readouterr().out
    assert "n1.log <==\n[rank0]: on n1\n" in printed
    assert printed.index("7.out <==\nstep 3/3  loss 0.1\n") < printed.index("n1.log")
    assert "n3.log" not in printed
    assert "n2.log <==\n[rank0]: on n2\n" in printed
    assert runs_command(RunsOptions(("why", run.id), root)) == 0
    assert capsys.readouterr().out.startswith(f"{run.name}/{run.id}: finished\n")


def test_what_a_person_took_out_of_the_queue_does_not_wait_to_be_released(run: RunDirectory) -> None:
    run.new_attempt()
    settle(run, Ended(1, "stopped", 75, step_reached=9, step_saved=9, stop_reason="gradus runs cancel"), retries=3)
    events = EventWriter(run, "submit")
    events.write("cancel", job_id="7", by="gradus runs cancel")
    events.close()
    write_status(run, Status("stopped", 9, attempt=1))
    told = "\n".join(story_of(run).lines)
    assert "released" not in told
    assert "hold" not in told
    assert "job 7 was taken out of the queue by 'gradus runs cancel'" in told


def test_of_a_script_that_says_nothing_of_steps_none_are_told(run: RunDirectory) -> None:
    run.new_attempt({COMMAND_FILE: "{}"})
    settle(run, Ended(1, "finished", 0, counts_steps=False), retries=3)
    write_status(run, Status("finished", attempt=1))
    told = story_of(run).lines
    assert "attempt 1: finished" in told
    assert not any("step" in line or "saved" in line for line in told)


def test_a_finished_attempt_is_told_once(run: RunDirectory) -> None:
    run.new_attempt()
    settle(run, Ended(1, "finished", 0, step_reached=60), retries=3)
    write_status(run, Status("finished", 60, attempt=1))
    assert [line for line in story_of(run).lines if "finished at" in line] == ["attempt 1: finished at step 60"]


def test_an_attempt_after_which_a_person_submitted_the_run_again_was_not_requeued(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_queue(monkeypatch, JobState("8", "RUNNING"))
    run.job.mkdir()
    jobs = [{"job_id": job, "submitted_at": "2026-11-15T23:00:00+00:00", "after": None} for job in ("7", "8")]
    (run.job / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    for attempt, job in ((1, 7), (2, 8)):
        run.new_attempt()
        write_place(run, attempt, JobPlace(job, nodes=("n1",)))
    settle(run, Ended(1, "lost", None, step_reached=5), retries=3)
    write_status(run, Status("running", 5, attempt=2))
    [told] = [line for line in story_of(run).lines if line.startswith("attempt 1")]
    assert told == "attempt 1: lost at step 5; started again by hand, as job 8"


def test_what_a_waiting_run_waits_for_is_named_by_its_number(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_queue(monkeypatch, JobState("8", "PENDING", "Dependency", dependency="afterok:7(unfulfilled)"))
    run.job.mkdir()
    (run.job / "jobs.jsonl").write_text('{"job_id": "8", "submitted_at": "2026-11-15T23:00:00+00:00"}\n')
    story = story_of(run)
    assert "job 8 waits: it waits for another job to end (Dependency): job 7" in story.lines
    assert "squeue -j 8 -o %E shows which" in story.next_steps


def in_queue(monkeypatch: pytest.MonkeyPatch, job: JobState) -> None:
    """What Slurm would say."""
    asked = Queue({job.job_id: job}, datetime.now(timezone.utc))
    monkeypatch.setattr("gradus.launcher.story.queue", lambda fresh_seconds: asked)
    monkeypatch.setattr("gradus.launcher.slurm.standing.job_state", lambda job_id: job)
