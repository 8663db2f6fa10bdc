"""What a batch script asks for between its lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradus.hardware.detect import detect_machine
from gradus.launcher.attempt import write_attempt
from gradus.launcher.job_place import JOB_FILE, JobPlace
from gradus.launcher.ledger import read_ledger
from gradus.launcher.slurm import job
from gradus.launcher.slurm.allocation import Allocation
from gradus.launcher.slurm.description import DESCRIPTION_FILE, JobDescription
from gradus.launcher.verdict import is_of_people
from gradus.record.directory import RunDirectory
from gradus.record.outcome import write_outcome
from gradus.record.status import State, Status, read_status, write_status
from gradus.record.stop import request_stop, requested_end, requested_stop
from gradus.schema.cluster import Cluster


def test_a_signal_of_the_scheduler_becomes_a_stop_request(run: RunDirectory) -> None:
    assert job.main(["stop", str(run.path), "SIGUSR1"]) == 0
    assert requested_stop(run) == "SIGUSR1"


@pytest.mark.parametrize("now", [False, True])
def test_what_a_person_asked_for_is_not_replaced_by_a_signal_that_comes_after(run: RunDirectory, now: bool) -> None:
    """To be held and not requeued, or to end at once: the SIGTERM of `scancel` comes after both."""
    request_stop(run, "gradus runs stop", now=now)
    assert job.main(["stop", str(run.path), "SIGTERM"]) == 0
    assert requested_stop(run) == "gradus runs stop"
    assert (requested_end(run) is not None) == now


@pytest.mark.parametrize(
    ("outcome", "state", "code"),
    [
        ({"state": "finished", "exit_code": 0, "step": 9}, "finished", 0),
        ({"state": "failed", "exit_code": 93, "error": {"kind": "do-not-restart", "message": "no"}}, "failed", 93),
        ({"state": "failed", "exit_code": 1, "error": {"kind": "interrupted", "message": "by hand"}}, "failed", 1),
    ],
)
def test_an_attempt_that_was_over_before_its_job_was_killed_is_not_repeated(
    run: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: dict[str, Any],
    state: str,
    code: int,
) -> None:
    """On a machine whose Slurm does not answer."""
    run.job.mkdir()
    (run.job / DESCRIPTION_FILE).write_text(JobDescription(2, 1).to_json())
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    attempt = run.new_attempt({JOB_FILE: JobPlace(76, nodes=("n1", "n2")).to_json()})
    write_outcome(run, attempt, outcome)
    write_status(run, Status("running", 9, attempt=attempt))
    assert job.main(["begin", str(run.path)]) == code
    assert capsys.readouterr().out == "", "the batch script takes that for the end"
    assert run.attempts == [attempt]
    status = read_status(run)
    assert status is not None
    assert status.state == state
    assert [line.ended.nodes for line in read_ledger(run)] == [("n1", "n2")]


def test_of_a_job_that_slurm_has_put_back_its_output_says_that_it_was_preempted(run: RunDirectory) -> None:
    here = Allocation(7, ("n1",))
    run.job.mkdir()
    (run.job / "7.out").write_text("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-16T03:26:35 ***\n")
    assert not job._is_preempted(run, here, None)
    (run.job / "7.out").write_text(
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-16T03:26:35 DUE TO PREEMPTION ***\n"
    )
    assert job._is_preempted(run, here, None)


@pytest.mark.parametrize(("reason", "stays"), [("gradus runs stop", True), ("SIGUSR1", False)])
def test_a_person_who_asks_while_an_attempt_is_being_made_is_heard(run: RunDirectory, reason: str, stays: bool) -> None:
    request_stop(run, reason)
    cluster = Cluster(name="c", nodes=1, cpu_cores=2, memory_gib=1)
    write_attempt(run, cluster, detect_machine(), {}, is_new=is_of_people)
    assert requested_stop(run) == (reason if stays else None)
    write_attempt(run, cluster, detect_machine(), {})
    assert requested_stop(run) is None
    assert list(run.control.glob("answered*")) == []


@pytest.mark.parametrize(("state", "total"), [("queued", 100), ("stopped", None)])
def test_what_comes_back_from_the_queue_has_as_many_steps_as_before(
    run: RunDirectory, state: State, total: int | None
) -> None:
    """And what a person starts again may have others."""
    write_status(run, Status(state, 31, 100))
    write_attempt(run, Cluster(name="c", nodes=1, cpu_cores=2, memory_gib=1), detect_machine(), {})
    status = read_status(run)
    assert status is not None
    assert (status.step, status.steps_total) == (31, total)
