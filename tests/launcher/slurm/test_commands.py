"""What Slurm's commands say, read back: jobs whose own words cannot pass for fields, and refusals explained."""

from __future__ import annotations

import pytest

from gradus.hardware.slurm_command import Answer, records
from gradus.launcher.slurm.commands import OVER, explained, jobs_in_text, passes, slurm_moment

# As Slurm 22.05.8 prints it; the name and the comment were chosen to look like its own fields.
SHOWN = """\
JobId=12 JobName=x JobState=COMPLETED Reason=None
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=(null) QOS=(null)
   JobState=PENDING Reason=ReqNodeNotAvail,_UnavailableNodes:n3 Dependency=afterok:11(unfulfilled)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:00 TimeLimit=00:10:00 TimeMin=N/A
   SubmitTime=2026-11-15T23:04:42 EligibleTime=2026-11-15T23:04:42
   AccrueTime=Unknown
   StartTime=2026-11-16T01:00:00 EndTime=Unknown Deadline=N/A
   Partition=main AllocNode:Sid=localhost:14713
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=
   NumNodes=2-2 NumCPUs=4 NumTasks=2 CPUs/Task=2 ReqB:S:C:T=0:0:*:*
   Command=/runs/a b/job/script.sh Partition=other
   WorkDir=/runs/a b
   Comment=hello NodeList=n9 Restarts=7
   StdErr=/runs/a b/job/12.out
   Power=
"""


def test_a_job_is_read_and_its_own_words_are_no_fields() -> None:
    [job] = jobs_in_text(SHOWN)
    assert (job.job_id, job.state, job.restarts, job.requeue) == ("12", "PENDING", 2, True)
    assert (job.partition, job.nodes, job.node_count, job.time_limit) == ("main", "", 2, "00:10:00")
    assert job.name == "x JobState=COMPLETED Reason=None"
    assert job.command == "/runs/a b/job/script.sh Partition=other"
    assert job.dependency == "afterok:11(unfulfilled)"
    assert job.starts_at == slurm_moment("2026-11-16T01:00:00")
    assert job.ends_at is None
    assert job.waits
    assert not job.is_over


def test_several_jobs_and_those_of_arrays() -> None:
    array = SHOWN.replace("JobId=12", "JobId=14 ArrayJobId=12 ArrayTaskId=3").replace("PENDING", "RUNNING")
    jobs = jobs_in_text(f"{SHOWN}\n{array}\n")
    assert [job.job_id for job in jobs] == ["12", "12_3"]
    assert not jobs[1].waits


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin", "job_requeued_in_held_state", "JobHoldMaxRequeue"])
def test_a_held_job_is_known_by_its_reason(reason: str) -> None:
    [job] = jobs_in_text(SHOWN.replace("ReqNodeNotAvail,_UnavailableNodes:n3", reason))
    assert job.is_held
    assert not jobs_in_text(SHOWN)[0].is_held


# As Slurm 22.05.8 shows jobs whose processes were still ending, after each of these was done to them.
COMPLETING = {
    "scancel": "JobState=COMPLETING Reason=None\n   StartTime=2026-11-16T03:22:45 EndTime=2026-11-16T03:22:46",
    "preempted, cancel": "JobState=COMPLETING Reason=None\n   StartTime=2026-11-16T03:26:33 EndTime=2026-11-16T03:26:35"
    "\n   PreemptEligibleTime=2026-11-16T03:26:33 PreemptTime=2026-11-16T03:26:35",
    "preempted, requeue": "JobState=COMPLETING Reason=None\n   StartTime=Unknown EndTime=Unknown",
    "preempted, requeue, at first": "JobState=COMPLETING Reason=None\n   EndTime=2999-11-16T04:26:59",
    "time limit": "JobState=COMPLETING Reason=TimeLimit\n   StartTime=2026-11-16T03:27:19 EndTime=2026-11-16T03:28:32",
    "node died": "JobState=COMPLETING Reason=NodeDown\n   StartTime=2026-11-16T03:28:48 EndTime=2026-11-16T03:29:18",
}


def test_a_job_that_was_taken_away_is_told_from_one_that_ends_otherwise_while_its_processes_end() -> None:
    found = {done: jobs_in_text(f"JobId=12 JobName=x\n   {shown}\n")[0] for done, shown in COMPLETING.items()}
    assert [done for done, job in found.items() if job.is_cancelled] == ["scancel"]
    [over] = jobs_in_text("JobId=12 JobName=x\n   JobState=CANCELLED Reason=None\n")
    assert over.is_cancelled


def test_a_job_that_is_preempted_is_told_from_one_that_was_in_an_earlier_start() -> None:
    shown = "JobId=12 JobName=x\n   JobState=RUNNING Reason=None\n   StartTime=2026-11-16T03:26:33 PreemptTime="
    preempted = {when: jobs_in_text(f"{shown}{when}\n")[0].is_preempted for when in ("2026-11-16T03:26:35", "None")}
    assert preempted == {"2026-11-16T03:26:35": True, "None": False}
    assert not jobs_in_text(f"{shown}2026-11-16T03:20:00\n")[0].is_preempted


def test_a_job_that_cleans_up_is_not_over() -> None:
    assert "COMPLETING" not in OVER
    assert {"COMPLETED", "TIMEOUT", "NODE_FAIL", "CANCELLED"} <= OVER


def test_records_are_apart_by_empty_lines() -> None:
    text = "PartitionName=a\n   State=UP TotalNodes=4\n\nPartitionName=b\n   State=DOWN TotalNodes=2\n\n"
    assert [record["State"] for record in records(text)] == ["UP", "DOWN"]


# Each as sbatch 22.05.8 printed it.
REFUSALS = [
    ("sbatch: error: invalid partition specified: foo\nsbatch: error: Batch job submission failed: "
     "Invalid partition name specified", "no such partition"),
    ("allocation failure: More processors requested than permitted", "not so many"),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "no nodes"),
    ("sbatch: unrecognized option '--foo'\nTry \"sbatch --help\" for more information", "does not know an option"),
    ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
     "the account is unknown"),
    ("sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
     "time limit"),
    ("sbatch: error: Invalid --signal specification", "does not know an option"),
    ("sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification", "GPUs"),
    ("sbatch: error: Batch job submission failed: Invalid feature specification", "feature"),
    ("sbatch: error: Batch job submission failed: Requested reservation is invalid", "reservation"),
    ("sbatch: error: Memory specification can not be satisfied", "memory"),
    ("sbatch: error: Batch job submission failed: Job dependency problem", "wait for"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "meaning"), REFUSALS)
def test_a_refusal_is_explained_keeps_slurms_words_and_is_bad_input(said: str, meaning: str) -> None:
    error = explained(Answer("", said, said.splitlines()[-1]), ["sbatch"])
    assert meaning in error.message
    assert error.details["said"] in error.message
    assert "submission failed" not in error.message
    assert "--help" not in error.details["said"]
    assert error.exit_code == 2
    assert error.hint
    assert not passes(error)


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "`squeue` took more than 30 s",
    ],
)
def test_a_controller_that_does_not_answer_is_no_bad_input_and_is_asked_again(said: str) -> None:
    error = explained(Answer("", said, said), ["sbatch"])
    assert "does not answer" in error.message
    assert passes(error)
    assert error.exit_code == 1


def test_packages_without_a_cluster_are_told_from_a_controller_that_is_away() -> None:
    said = (
        "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sbatch: error: fetch_config: DNS SRV lookup failed\n"
        "sbatch: error: _establish_config_source: failed to fetch config\n"
        "sbatch: fatal: Could not establish a configuration source"
    )
    error = explained(Answer("", said, said.splitlines()[-1]), ["sbatch"])
    assert "belong to no cluster" in error.message
    assert "DNS" not in error.message
    assert not passes(error)
