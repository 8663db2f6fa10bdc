"""The queue as squeue prints it, and how a run stands by its own files and by what the queue says of its job."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest

from gradus.launcher.slurm.commands import JobState
from gradus.launcher.slurm.queue import Queue, jobs_in_lines, submissions
from gradus.launcher.slurm.standing import Standing, standing
from gradus.record.directory import RunDirectory
from gradus.record.status import Status

NOW = datetime.now(timezone.utc)
# As squeue 22.05.8 prints it; the script's path has a bar in it.
LINES = """\
7|RUNNING|None|main|n[1-2]|2|2026-11-15T23:04:42|2026-11-15T23:04:43|2026-11-15T23:14:43|10:00|/runs/a|b/job/script.sh
8_3|PENDING|Resources|main||2|2026-11-15T23:04:42|N/A|N/A|UNLIMITED|/runs/c/job/script.sh
"""


def test_lines_are_read_whatever_is_in_the_path() -> None:
    jobs = jobs_in_lines(LINES)
    assert list(jobs) == ["7", "8_3"]
    assert (jobs["7"].state, jobs["7"].nodes, jobs["7"].node_count) == ("RUNNING", "n[1-2]", 2)
    assert jobs["7"].command == "/runs/a|b/job/script.sh"
    assert jobs["8_3"].waits
    assert jobs["8_3"].starts_at is None


def submitted(run: RunDirectory, job_id: str = "7", seconds_ago: float = 60) -> None:
    run.job.mkdir(exist_ok=True)
    at = (NOW - timedelta(seconds=seconds_ago)).isoformat(timespec="seconds")
    with (run.job / "jobs.jsonl").open("a") as file:
        file.write(json.dumps({"job_id": job_id, "submitted_at": at, "after": None}) + "\n")


def stands(run: RunDirectory, state: str, *jobs: JobState, problem: str | None = None, silent: float = 0) -> Standing:
    seen = datetime.now(timezone.utc) - timedelta(seconds=silent)  # not NOW: that is when this file was read
    status = Status(state, updated_at=seen)  # type: ignore[arg-type]
    return standing(run, status, Queue({job.job_id: job for job in jobs}, NOW, problem))


def test_a_run_that_no_scheduler_knows_is_as_its_status_says(run: RunDirectory) -> None:
    assert stands(run, "running") == Standing("running")
    assert stands(run, "running", silent=90).state == "lost"


def test_a_job_that_waits_is_a_run_in_the_queue_whatever_its_last_attempt_left(run: RunDirectory) -> None:
    submitted(run)
    starts = NOW + timedelta(hours=1)
    for state in ("queued", "stopped", "running"):
        found = stands(run, state, JobState("7", "PENDING", "Priority", starts_at=starts))
        assert (found.state, found.starts_at) == ("queued", starts)
        assert found.reason is not None
        assert "higher priority" in found.reason.words


def test_a_held_job_has_no_start_to_expect(run: RunDirectory) -> None:
    submitted(run)
    found = stands(run, "queued", JobState("7", "PENDING", "JobHeldUser", starts_at=NOW))
    assert found.starts_at is None
    assert found.in_queue


def test_a_job_that_runs_before_its_ranks_do_is_starting(run: RunDirectory) -> None:
    submitted(run)
    assert stands(run, "queued", JobState("7", "RUNNING")).state == "starting"
    assert stands(run, "running", JobState("7", "RUNNING")).state == "running"


def test_silence_of_a_job_that_runs_is_noted_and_not_taken_for_its_end(run: RunDirectory) -> None:
    submitted(run)
    found = stands(run, "running", JobState("7", "RUNNING"), silent=90)
    assert found.state == "running"
    assert found.note is not None
    assert "no sign of life" in found.note


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_job_that_ended_without_a_word_is_lost(run: RunDirectory, state: str) -> None:
    submitted(run)
    found = stands(run, state, JobState("7", "NODE_FAIL"))
    assert found.state == "lost"
    assert found.note is not None
    assert "node fail" in found.note
    gone = stands(run, state)
    assert gone.state == "lost"
    assert gone.note == "job 7 is not in the queue any more and left no word"


@pytest.mark.parametrize("state", ["finished", "failed", "stopped"])
def test_a_run_that_told_its_end_needs_no_job(run: RunDirectory, state: str) -> None:
    submitted(run)
    assert stands(run, state).state == state
    assert stands(run, state, JobState("7", "COMPLETED")).state == state


def test_of_several_jobs_the_newest_counts(run: RunDirectory) -> None:
    submitted(run, "7")
    submitted(run, "9")
    found = stands(run, "queued", JobState("7", "COMPLETED"), JobState("9", "PENDING", "Dependency"))
    assert (found.state, found.job_id) == ("queued", "9")
    assert [submission.job_id for submission in submissions(run)] == ["7", "9"]


def test_nothing_is_called_lost_while_slurm_does_not_answer(run: RunDirectory) -> None:
    submitted(run)
    found = stands(run, "queued", problem="Unable to contact slurm controller")
    assert found.state == "queued"
    assert found.note is not None
    assert "does not answer" in found.note


def test_a_job_that_is_younger_than_the_answer_is_not_lost(run: RunDirectory) -> None:
    submitted(run, seconds_ago=-1)
    assert stands(run, "queued").state == "queued"


def test_a_line_that_is_no_record_is_passed_over(run: RunDirectory) -> None:
    submitted(run)
    with (run.job / "jobs.jsonl").open("a") as file:
        file.write('{"job_id": "8"}\n{"half')
    assert [submission.job_id for submission in submissions(run)] == ["7"]
