"""The queue of a real Slurm: reasons in plain words, one question for all who ask, and patience with its controller."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm.lab import Lab

from gradus.launcher.slurm.commands import JobState, SlurmError, job_state
from gradus.launcher.slurm.queue import queue
from gradus.launcher.slurm.reasons import explained_reason


@pytest.fixture(autouse=True)
def in_the_lab(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process asks the lab, and keeps what it learns in a folder of the test."""
    monkeypatch.setenv("SLURM_CONF", lab.environment["SLURM_CONF"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def job_when(job_id: str, is_so: Callable[[JobState], bool], seconds: float = 60) -> JobState:
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        job = queue(0).find(job_id)
        if job is not None and is_so(job):
            return job
        time.sleep(0.2)
    raise AssertionError(f"not so after {seconds} s: {queue(0).find(job_id)}")


def reason_of(job_id: str, reason: str) -> str:
    """The words for a reason, once Slurm gives it."""
    return explained_reason(job_when(job_id, lambda job: job.reason.startswith(reason)).reason).words


def filled(lab: Lab, *options: str) -> str:
    """A job on all nodes, for a while."""
    job = lab.sbatch("-N4", "--exclusive", "--time=5", *options, wrap="sleep 300")
    lab.wait_for_state(job, "RUNNING")
    return job


def test_a_job_that_runs_and_one_that_waits_for_its_nodes(lab: Lab) -> None:
    running = filled(lab)
    first, second = (lab.sbatch("-N4", "--exclusive", "--time=5", wrap="true") for _ in range(2))
    assert "until enough nodes are free" in reason_of(first, "Resources")
    assert "higher priority" in reason_of(second, "Priority")
    job = job_when(first, lambda job: job.starts_at is not None)
    now = queue(0).find(running)
    assert now is not None
    assert now.nodes == "n[1-4]"
    assert job.starts_at >= now.ends_at, "it is expected when the first one must end"


def test_jobs_that_are_held_early_or_wait_for_others(lab: Lab) -> None:
    begin = lab.sbatch("--begin=now+1hour", wrap="true")
    assert "earliest start" in reason_of(begin, "BeginTime")
    assert "another job" in reason_of(lab.sbatch(f"--dependency=afterok:{begin}", wrap="true"), "Dependency")
    lab.run("scontrol", "uhold", begin)
    assert "held" in reason_of(begin, "JobHeldUser")
    held = queue(0).find(begin)
    assert held is not None
    assert held.is_held


def test_a_job_that_waits_for_one_that_failed(lab: Lab) -> None:
    failing = lab.sbatch("--begin=now+1hour", wrap="true")
    waiting = lab.sbatch(f"--dependency=afterok:{failing}", wrap="true")
    lab.run("scancel", failing)
    assert "for ever" in reason_of(waiting, "DependencyNeverSatisfied")


def test_partitions_that_changed_after_the_job_was_submitted(lab: Lab) -> None:
    job = lab.sbatch("-p", "low", "--time=30", "--hold", wrap="true")
    try:
        lab.run("scontrol", "update", "PartitionName=low", "MaxTime=10")
        lab.run("scontrol", "release", job)
        assert "longer than the partition allows" in reason_of(job, "PartitionTimeLimit")
        lab.run("scontrol", "update", "PartitionName=low", "State=DOWN")
        assert "takes no jobs now" in reason_of(job, "PartitionDown")
    finally:
        lab.run("scontrol", "update", "PartitionName=low", "State=UP", "MaxTime=1-00:00:00")


def test_arrays_are_one_job_for_each_task(lab: Lab) -> None:
    array = lab.sbatch("--array=0-2%1", wrap="sleep 60")
    job_when(f"{array}_0", lambda job: job.state == "RUNNING")
    assert "as many jobs of its array" in reason_of(f"{array}_1", "JobArrayTaskLimit")
    assert f"{array}_2" in queue(0).jobs


def job_questions(lab: Lab) -> int:
    """How often the controller was asked for its jobs, by its own count."""
    found = re.search(r"REQUEST_JOB_(?:USER_)?INFO\s+\(.*?\)\s+count:(\d+)", lab.run("sdiag"))
    return int(found[1]) if found else 0


def test_many_who_look_at_once_are_one_question_to_the_controller(lab: Lab) -> None:
    lab.sbatch("--begin=now+1hour", wrap="true")
    lab.run("sdiag", "--reset")
    ask = "from gradus.launcher.slurm.queue import queue; assert len([queue(60).jobs for _ in range(50)][-1]) >= 1"
    processes = [subprocess.Popen([sys.executable, "-c", ask], env=dict(os.environ)) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0, 0, 0, 0]
    assert job_questions(lab) == 1
    queue(0)
    assert job_questions(lab) == 2


def test_what_is_kept_is_for_its_user_alone(tmp_path: Path) -> None:
    queue(0)
    [file] = (tmp_path / "cache" / "gradus").glob("queue-*.json")
    assert (file.parent.stat().st_mode & 0o077) == 0


def test_without_a_place_to_keep_it_the_queue_is_asked_all_the_same(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = lab.sbatch("--begin=now+1hour", wrap="true")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert job in queue(0).jobs


def test_settings_of_a_user_do_not_change_what_is_read(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    job = lab.sbatch("--begin=now+1hour", wrap="true")
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "%H o'clock")
    found = queue(0).find(job)
    assert found is not None
    assert found.starts_at is not None


def test_a_job_is_asked_about_by_its_number_and_forgotten_ones_are_none(lab: Lab) -> None:
    job = lab.sbatch("--begin=now+1hour", "--comment=JobState=RUNNING", "--job-name=a JobState=RUNNING b", wrap="true")
    found = job_state(job)
    assert found is not None
    assert (found.state, found.reason) == ("PENDING", "BeginTime")
    assert job_state("999999") is None


@pytest.mark.slow
def test_while_the_controller_is_away_the_last_answer_stands_with_the_problem(lab: Lab) -> None:
    job = lab.sbatch("--begin=now+1hour", wrap="true")
    assert job in queue(0).jobs
    lab.kill_controller()
    away = queue(0)
    assert job in away.jobs
    assert away.problem is not None
    assert "does not answer" in away.problem
    with pytest.raises(SlurmError, match="does not answer"):
        job_state(job)
    lab.start_controller()
    assert queue(0).problem is None
