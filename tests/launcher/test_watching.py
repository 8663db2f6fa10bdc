"""What is seen of a run comes from its files, survives all of them, and says when nothing more comes."""

from __future__ import annotations

import os
import socket
from datetime import datetime, timedelta, timezone

import pytest
from watched_runs import begin, fail, health, save, say, submitted, train

from gradus.launcher import watching as module
from gradus.launcher.ending import note_end_at_once
from gradus.launcher.ledger import settle
from gradus.launcher.slurm.commands import JobState
from gradus.launcher.slurm.queue import Queue
from gradus.launcher.verdict import Ended
from gradus.launcher.watching import Watching
from gradus.record.append_log import AppendLog
from gradus.record.status import read_status


def in_queue(monkeypatch: pytest.MonkeyPatch, job: JobState | None, problem: str | None = None) -> None:
    """What Slurm would answer: the answer is what is put here, and not a command of Slurm."""
    jobs = {job.job_id: job} if job else {}
    monkeypatch.setattr(module, "queue", lambda: Queue(jobs, datetime.now(timezone.utc), problem))


def test_a_run_before_its_first_file_is_waited_for(run):
    view = Watching(run).look()
    assert (view.state, view.over, view.step, view.loss) == ("unknown", False, 0, None)


def test_files_that_appear_late_are_seen_when_they_do(run):
    watching = Watching(run)
    watching.look()
    attempt = begin(run)
    assert (watching.look().state, watching.look().steps_total) == ("running", 100)
    train(run, attempt, 1, 10)
    view = watching.look()
    assert (view.step, view.loss, view.eta_seconds) == (10, 4.8, 45.0)
    save(run, 10)
    assert watching.look().saved_step == 10
    train(run, attempt, 11, 12)
    assert watching.look().step == 12


def test_speed_is_held_against_the_prediction_of_that_attempt(run):
    attempt = begin(run, prediction_json={"tokens_per_second": 4000.0})
    train(run, attempt, 1, 10)
    speed = Watching(run).look().speed
    assert speed is not None
    assert (speed.unit, speed.per_second, speed.predicted, speed.share) == ("tok", 2000, 4000, 0.5)


def test_without_a_prediction_there_is_nothing_to_hold_it_against(run):
    train(run, begin(run), 1, 3)
    speed = Watching(run).look().speed
    assert speed is not None
    assert speed.predicted is None


def test_an_attempt_that_goes_on_from_a_checkpoint_is_shown_from_there(run):
    train(run, begin(run), 1, 30)
    save(run, 20)
    train(run, begin(run, step=20), 21, 22, seconds=1.0)
    view = Watching(run).look()
    assert (view.attempt, view.step, view.step_seconds, len(view.losses)) == (2, 22, 1.0, 22)
    assert view.goodput is not None
    assert view.goodput.lost_steps == 10


def test_torn_lines_and_half_files_do_not_end_who_looks(run):
    attempt = begin(run)
    train(run, attempt, 1, 5)
    with run.metrics_path.open("a") as file:
        file.write('{"step": 6, "attempt": 1, "loss"')
    for name in ("status.json", "health.json", "control/ledger.jsonl", "attempts/1/prediction.json"):
        (run.path / name).write_text('{"step": ')
    view = Watching(run).look()
    assert (view.step, view.state, view.health) == (5, "unknown", None)


def test_looking_writes_nothing(run):
    attempt = begin(run)
    train(run, attempt, 1, 5)
    health(run, 2)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    watching = Watching(run)
    watching.look()
    watching.look()
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_the_launcher_leaves_the_goodput_in_the_status_when_an_attempt_is_over(run):
    attempt = begin(run)
    train(run, attempt, 1, 5)
    note_end_at_once(run, attempt, "somebody")
    status = read_status(run)
    assert status is not None
    assert status.goodput == Watching(run).look().goodput.share > 0


# -- when it is over --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("stopped", 75), ("failed", 1)])
def test_a_local_run_is_over_when_its_status_says_so(run, state, code):
    begin(run)
    say(run, state, 10)
    view = Watching(run).look()
    assert (view.over, view.exit_code) == (True, code)


def test_a_run_with_bad_input_has_that_exit_code(run):
    from gradus.record.events import EventWriter

    attempt = begin(run)
    EventWriter(run, f"launcher-attempt-{attempt}").write(
        "end", attempt=attempt, state="failed", exit_code=2, error=None
    )
    say(run, "failed", 0)
    assert Watching(run).look().exit_code == 2


def test_a_run_whose_process_is_gone_from_this_machine_is_lost_and_over(run):
    begin(run)
    say(run, "running", 3, host=socket.gethostname(), pid=2**22 - 3)
    view = Watching(run).look()
    assert (view.state, view.over, view.exit_code) == ("lost", True, 1)


@pytest.mark.parametrize(("silent_seconds", "over"), [(90, False), (200, True)])
def test_a_late_sign_of_life_from_another_machine_is_waited_for_a_while(run, silent_seconds, over):
    begin(run)
    say(run, "running", 3, updated_at=datetime.now(timezone.utc) - timedelta(seconds=silent_seconds))
    view = Watching(run).look()
    assert (view.state, view.over) == ("lost", over)


def test_a_slow_start_on_this_machine_is_not_lost_while_its_process_is_there(run):
    begin(run)
    old = datetime.now(timezone.utc) - timedelta(seconds=300)
    say(run, "running", 3, host=socket.gethostname(), pid=os.getpid(), updated_at=old)
    view = Watching(run).look()
    assert (view.state, view.over) == ("running", False)
    assert view.note == "no sign of life for 5:00"


def test_a_finished_run_is_over_when_its_job_has_settled_that(run, monkeypatch):
    """Another rank may fail after rank 0 has finished."""
    submitted(run)
    attempt = begin(run)
    say(run, "finished", 100)
    in_queue(monkeypatch, JobState("7", "RUNNING"))
    assert not Watching(run).look().over
    settle(run, Ended(attempt, "finished", 0, step_reached=100), 3)
    assert Watching(run).look().over


def test_a_failed_attempt_of_a_job_that_goes_on_is_not_the_end(run, monkeypatch):
    submitted(run)
    fail(run, begin(run), 7)
    in_queue(monkeypatch, JobState("7", "RUNNING"))
    assert not Watching(run).look().over


def test_a_job_that_gave_up_is_over_with_93(run, monkeypatch):
    submitted(run)
    fail(run, begin(run), 7)
    fail(run, begin(run), 7)
    in_queue(monkeypatch, JobState("7", "FAILED"))
    view = Watching(run).look()
    assert (view.over, view.exit_code, len(view.attempts)) == (True, 93, 2)


def test_while_slurm_does_not_answer_the_ledger_says_whether_more_comes(run, monkeypatch):
    submitted(run)
    in_queue(monkeypatch, None, problem="Slurm's controller does not answer")
    fail(run, begin(run), 7)
    assert not Watching(run).look().over
    fail(run, begin(run), 7)
    view = Watching(run).look()
    assert (view.over, view.exit_code) == (True, 93)


def test_a_queued_run_says_why_in_plain_words(run, monkeypatch):
    submitted(run)
    in_queue(monkeypatch, JobState("7", "PENDING", "Resources"))
    view = Watching(run).look()
    assert (view.state, view.over) == ("queued", False)
    assert "until enough nodes are free" in str(view.note)


def test_a_run_that_a_person_stopped_is_over_though_it_is_held_in_the_queue(run, monkeypatch):
    submitted(run)
    attempt = begin(run)
    settle(run, Ended(attempt, "stopped", 75, step_saved=5, stop_reason="gradus runs stop"), 3)
    say(run, "queued", 5)
    in_queue(monkeypatch, JobState("7", "PENDING", "JobHeldUser"))
    view = Watching(run).look()
    assert (view.over, view.exit_code) == (True, 75)


def test_the_deadline_is_the_jobs(run):
    at = datetime(2030, 1, 1, tzinfo=timezone.utc)
    begin(run, job_json={"job_id": 7, "nodes": ["n1"], "deadline": at.timestamp()})
    assert Watching(run).look().ends_at == at


def test_a_million_steps_are_read_once(run):
    attempt = begin(run)
    train(run, attempt, 1, 300)
    watching = Watching(run)
    watching.look()
    log = AppendLog(run.metrics_path)
    log.write({"step": 301, "attempt": attempt, "loss": 1.0, "step_seconds": 0.5})
    with run.metrics_path.open("r+") as file:
        file.write("x" * 200)  # what was read is not looked at again
    assert watching.look().step == 301
