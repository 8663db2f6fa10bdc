"""A run on a real scheduler, watched from outside to its end; and the report that its job leaves in the log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm.jobs import Jobs
from slurm.lab import Lab

pytestmark = pytest.mark.slow


def test_a_run_is_watched_from_the_queue_to_its_end_and_reports_what_it_used(lab: Lab, tmp_path: Path) -> None:
    jobs = Jobs(lab, tmp_path)
    run = jobs.submit(jobs.recipe(steps=20), "--sbatch", "--begin=now+1hour", STEP_SECONDS="0.2")
    waiting = jobs.gradus("watch", str(run.path), "--once")
    assert waiting.code == 0
    assert "queued" in waiting.out.splitlines()[0]
    assert "its earliest start is not yet here" in waiting.out
    lab.run("scontrol", "update", f"JobId={run.job_ids[0]}", "StartTime=now")

    watched = jobs.gradus("watch", str(run.path), "--json", "--every", "1")
    assert watched.code == 0, watched.out
    seen = watched.json
    assert (seen["state"], seen["over"], seen["step"], seen["exit_code"]) == ("finished", True, 20, 0)
    assert seen["job_id"] == run.job_ids[0]
    assert [attempt["decision"] for attempt in seen["attempts"]] == ["finished"]
    assert 0 < seen["goodput"]["share"] < 1
    assert 0 < run.status["goodput"] < 1

    run.ended()
    said = "".join(path.read_text() for path in run.path.glob("job/*.out"))
    assert f"job report: job {run.job_ids[0]} on 2 nodes × 2 ranks: finished, step 20 of 20" in said
    report = json.loads((run.path / "job" / "report.json").read_text())
    assert (report["cpus"], report["nodes"], report["silent_nodes"]) == (4, seen["attempts"][0]["nodes"], 0)
    assert report["cpu_seconds"] > 0
    assert report["largest_process_bytes"] > 2**27  # a process with torch in it
    assert report["time_limit_seconds"] > report["allocated_seconds"] > report["goodput"]["kept_seconds"] > 0
