"""The job report says what was used of what was given, and what to ask for next time; and `not measured`, never 0."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gradus.launcher.job_facts import Failure, JobFacts, allocated_in_record, job_facts
from gradus.launcher.job_place import JOB_FILE, JobPlace
from gradus.launcher.job_report import flags, job_report, report_document, report_text
from gradus.launcher.ledger import settle
from gradus.launcher.slurm.node_ending import NodeEnding, write_node_ending
from gradus.launcher.slurm.options import with_options
from gradus.launcher.verdict import Ended
from gradus.record.append_log import AppendLog
from gradus.record.events import EventWriter, rank_writer
from gradus.record.goodput import Goodput
from gradus.record.status import Status, write_status
from gradus.schema.scheduler import Scheduler

GIB = 2**30


def goodput(allocated: float = 3600, kept: float = 2700, **numbers: Any) -> Goodput:
    fields = {"lost_seconds": 300.0, "lost_steps": 30, "starting_seconds": 120.0, "evaluation_seconds": 60.0}
    fields |= {"saving_seconds": 20.0, "waiting_seconds": 0.0, "attempts": 2, **numbers}
    return Goodput(allocated, kept, **fields)  # type: ignore[arg-type]


WHOLE = JobFacts(
    goodput(),
    "finished",
    "1234",
    ("n1", "n2"),
    ranks_per_node=4,
    cpus=64,
    gpus=8,
    memory_bytes=512 * GIB,
    time_limit_seconds=4 * 3600,
    waited_seconds=600,
    cpu_seconds=28_800,
    cpu_wall_seconds=7200,
    largest_process_bytes=2 * GIB,
    processes_per_node=8,
    mfu=0.41,
    gpu_memory_bytes=30 * GIB,
    gpu_memory_limit_bytes=80 * GIB,
    step_seconds=9.0,
    data_share=0.02,
    step=300,
    steps_total=300,
    failures=(Failure(1, "rank 3 was killed by SIGKILL", "again"),),
)


def test_the_report_of_a_job_that_was_given_too_much():
    assert report_text(WHOLE).splitlines() == [
        "job report: job 1234 on 2 nodes × 4 ranks: finished, step 300 of 300",
        "  time       1:00:00 of 4:00:00 allowed (25%); waited 10:00 in the queue",
        "  GPUs       8 for 1:00:00 = 8 GPU-hours; MFU 41.0% while in steps; memory 30 GiB of 80 GiB on rank 0",
        "  CPUs       4.0 of 32 cores on a node (12%) busy on average",
        "  memory     at most 28 GiB of 256 GiB allocated on a node: 14 processes, the largest of 2 GiB",
        "  goodput    75% = seconds in steps that were kept ÷ seconds allocated = 2700 ÷ 3600; lost 30 steps (300 s); "
        "starting 120 s in 2 attempts; evaluation 60 s; saving 20 s; other 400 s",
        "  attempt 1  rank 3 was killed by SIGKILL → again",
        "  next time  --time 01:15:00 --sbatch --cpus-per-task=8 --sbatch --mem=28G",
        "             --time 01:15:00: it took 1:00:00, and a quarter more is room; a shorter job starts sooner",
        "             --sbatch --cpus-per-task=8: of 32 cores on a node 4.0 were busy on average, and 8 processes need "
        "one each",
        "             --sbatch --mem=28G: at most 28 GiB of 256 GiB on a node were in use: 14 processes, the "
        "largest of 2 GiB",
    ]


def test_the_time_before_the_limit_in_which_a_job_is_asked_to_stop_comes_on_top():
    assert flags(replace(WHOLE, lead_seconds=120))[0].flag == "--time 01:20:00"


def test_what_was_used_well_needs_no_other_flags():
    used = replace(
        WHOLE, time_limit_seconds=1.5 * 3600, cpu_seconds=7200 * 20, largest_process_bytes=12 * GIB, failures=()
    )
    assert flags(used) == []
    assert "the same again is fine" in report_text(used)


def test_what_nobody_measured_is_said_to_be_so():
    bare = JobFacts(goodput(kept=0, lost_seconds=0.0, lost_steps=0), "finished", gpus=4, is_script=True)
    text = report_text(bare)
    assert text.count("not measured") == 4  # GPUs, CPUs, memory and goodput
    assert "0%" not in text
    assert "step" not in text.splitlines()[0]


def test_a_run_that_its_time_limit_ended_is_told_what_the_rest_needs():
    part = replace(WHOLE, state="stopped", step=100, time_limit_seconds=1800)
    (found, *_) = flags(part)
    # 200 steps of 9 s, to every 2700 of which come 380 that are lost, evaluated and saved in; and one start, of two.
    assert found.flag == "--time 00:50:00"
    assert "200 of 300 steps are left, 38:33" in found.reason


def test_no_more_time_is_recommended_than_the_partition_allows():
    part = replace(WHOLE, state="stopped", step=100, time_limit_seconds=600, longest_seconds=1200)
    (found, *_) = flags(part)
    assert found.flag == "--time 00:20:00"
    assert "the partition allows no more" in found.reason
    at_most = replace(part, time_limit_seconds=1200)
    assert not any(flag.flag.startswith("--time") for flag in flags(at_most))


def test_a_job_that_ended_before_its_first_step_is_not_fine():
    nothing = goodput(kept=0, lost_seconds=0.0, lost_steps=0)
    early = JobFacts(nothing, "stopped", "7", ("n1",), time_limit_seconds=60, steps_total=100)
    assert "a longer --time: this job ended before its first step" in report_text(early)


@pytest.mark.parametrize(
    ("asked", "gpus"),
    [("gres:gpu:1", 2), ("gres/gpu:a100:4", 8), ("gres:gpu", 2), ("gres:gpu:h100", 2), ("gres:shard:3", None)],
)
def test_gpus_that_a_site_does_not_count_are_those_that_were_asked_for(asked, gpus):
    record = {"TRES": "cpu=4,mem=2G,node=2,billing=4", "TresPerNode": asked, "NumNodes": "2"}
    assert allocated_in_record(record)["gpus"] == gpus


@pytest.mark.parametrize("facts", [{"state": "failed", "step": 100}, {"state": "stopped", "steps_total": None}])
def test_no_time_is_recommended_where_nothing_says_what_it_should_be(facts):
    assert not any(flag.flag.startswith("--time") for flag in flags(replace(WHOLE, **facts)))


def test_of_a_run_with_several_jobs_the_last_one_does_not_say_how_long_the_run_takes():
    assert not any(flag.flag.startswith("--time") for flag in flags(replace(WHOLE, only_job=False)))


def test_where_a_node_left_no_word_its_use_is_not_taken_for_none():
    silent = replace(WHOLE, silent_nodes=1)
    assert [flag.flag for flag in flags(silent)] == ["--time 01:15:00"]
    assert "1 of the nodes' parts left no word" in report_text(silent)


def test_a_job_that_failed_before_its_first_step_shows_nothing_of_what_a_good_one_needs():
    failed = replace(WHOLE, state="failed", step=0, goodput=goodput(kept=0, lost_seconds=0.0, lost_steps=0))
    assert flags(failed) == []
    assert "next time  first mend what failed" in report_text(failed)


def test_gpus_without_a_rank_are_not_asked_for_again():
    assert flags(replace(WHOLE, ranks_per_node=2, processes_per_node=4))[-1].flag == "--sbatch --gres=gpu:2"


def test_what_is_recommended_would_be_taken():
    found = [flag.flag for flag in flags(replace(WHOLE, ranks_per_node=2, processes_per_node=4))]
    options = [text.removeprefix("--sbatch ") for text in found if text.startswith("--sbatch ")]
    scheduler = with_options(Scheduler(kind="slurm"), options)
    assert (scheduler.cpus_per_task, scheduler.mem, scheduler.gres) == (5, "16G", "gpu:2")
    assert [text for text in found if not text.startswith("--sbatch ")] == ["--time 01:15:00"]


def test_a_loader_that_is_waited_for_is_named():
    assert "35% of a step waited for data" in report_text(replace(WHOLE, data_share=0.35))


def test_the_report_is_json_too():
    document = json.loads(json.dumps(report_document(WHOLE)))
    assert document["goodput"]["share"] == 0.75
    assert document["goodput"]["formula"].startswith("seconds in steps")
    assert document["flags"][0]["flag"] == "--time 01:15:00"
    assert document["failures"] == [{"attempt": 1, "what": "rank 3 was killed by SIGKILL", "decision": "again"}]


@pytest.mark.parametrize(
    ("record", "found"),
    [
        # As Slurm 22.05 prints it, and as 23.11 does (its documentation): TRES became ReqTRES and AllocTRES.
        ({"TRES": "cpu=8,mem=2000M,node=4,billing=8,gres/gpu=8", "TimeLimit": "00:10:00"}, (8, 8, 2000 * 2**20, 600)),
        (
            {"ReqTRES": "cpu=1", "AllocTRES": "cpu=2,mem=1.5G,node=1", "TimeLimit": "1-00:00:00"},
            (2, None, 1.5 * GIB, 86400),
        ),
        ({"TRES": "cpu=2,node=1,billing=2", "TimeLimit": "UNLIMITED"}, (2, None, None, None)),
        ({}, (None, None, None, None)),
    ],
)
def test_what_was_allocated_is_read_from_what_slurm_prints(record, found):
    assert tuple(allocated_in_record(record).values()) == found


# -- from the files of a run ------------------------------------------------------------------------------------------


def a_job(run, *, script: bool = False) -> int:
    described = {"command.json": "{}"} if script else {"recipe.yaml": "", "plan.yaml": "workers: 1\n"}
    attempt = run.new_attempt({**described, JOB_FILE: JobPlace(77, nodes=("n1", "n2")).to_json()})
    EventWriter(run, f"launcher-attempt-{attempt}").write("launch", attempt=attempt, ranks=4)
    for number in (0, 1):
        used = {"cpu_seconds": 30.0, "wall_seconds": 20.0, "peak_memory_bytes": (1 + number) * GIB}
        write_node_ending(run, attempt, NodeEnding(f"n{number}", number, 0, **used))
    return attempt


def test_facts_come_from_the_files_where_slurm_does_not_answer(run):
    attempt = a_job(run)
    EventWriter(run, rank_writer(attempt)).write("start", attempt=attempt, step=0, ranks=4)
    log = AppendLog(run.metrics_path)
    for step in range(1, 9):
        log.write({"step": step, "attempt": attempt, "step_seconds": 2.0, "data_seconds": 0.5, "mfu": 0.3})
    write_status(run, Status("failed", 8, 20, attempt))
    settle(run, Ended(attempt, "failed", 1, step_reached=8, error_message="no\nmore"), 3)
    found = job_facts(run, {})
    assert (found.job_id, found.nodes, found.ranks_per_node, found.processes_per_node) == ("77", ("n1", "n2"), 2, 4)
    assert (found.cpu_seconds, found.cpu_wall_seconds, found.largest_process_bytes) == (60, 40, 2 * GIB)
    assert (found.step_seconds, found.data_share, found.mfu, found.silent_nodes) == (2, 0.25, 0.3, 0)
    assert found.failures == (Failure(1, "no", "again"),)
    assert found.goodput.share is not None


def test_a_script_is_reported_too_and_its_numbers_are_left_in_the_job_folder(run):
    run.job.mkdir()
    a_job(run, script=True)
    write_status(run, Status("finished", attempt=1))
    text = job_report(run)
    assert "1.5 cores on a node busy on average" in text
    assert "largest process 2 GiB; of a whole node not measured" in text
    assert "goodput    not measured: no step was recorded; 1 attempt" in text
    assert json.loads((run.job / "report.json").read_text())["cpu_seconds"] == 60


def test_a_node_that_died_has_left_nothing_to_count(run):
    attempt = a_job(run)
    (run.control / "nodes" / str(attempt) / "1.json").write_text('{"node": "n1", "cpu_sec')
    assert job_facts(run, {}).silent_nodes == 1


def test_the_attempts_of_another_job_are_not_counted(run):
    a_job(run)
    second = run.new_attempt({JOB_FILE: JobPlace(78, nodes=("n1", "n2")).to_json()})
    assert job_facts(run, {}).cpu_seconds is None
    assert job_facts(run, {}).only_job is False
    assert job_facts(run, {"SLURM_JOB_ID": "77"}).cpu_seconds == 60
    assert second == 2


def test_a_run_without_any_attempt_has_a_report(run):
    assert "job report" in job_report(run)


def test_a_report_that_cannot_be_made_does_not_keep_a_job_from_going_on(run):
    run.events.rmdir()
    run.events.symlink_to(run.events)  # whoever reads it, fails
    (run.path / "metrics.jsonl").mkdir()
    assert job_report(run).startswith("job report: could not be made (")
