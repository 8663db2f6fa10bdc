"""`gradus explain` of a run that waits in a real queue, and of runs that Slurm has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gradus_command import wait_until
from slurm.jobs import Jobs, Run
from slurm.lab import Lab

# It takes no notice of being asked to stop before its time is over.
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("began", flush=True)
time.sleep(600)
"""


def first_finding(jobs: Jobs, run: Run) -> dict[str, Any]:
    done = jobs.gradus("explain", str(run.path), "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = done.json["findings"][0]
    return found


@pytest.mark.slow
def test_a_job_that_waits_was_taken_away_or_ran_out_of_time_is_explained_in_slurms_own_terms(
    lab: Lab, tmp_path: Path
) -> None:
    jobs = Jobs(lab, tmp_path)
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    shape = ("--cluster", str(jobs.cluster), "--nodes", "1", "--nproc", "1", "--time", "1m", "--json")
    done = jobs.gradus("submit", *shape, "--", "stubborn.py")
    assert done.code == 0, done.err
    late = Run(lab, Path(done.json["run"]))

    waits = jobs.submit(jobs.recipe(), "--begin", "now+1hour", nodes=1, ranks=4)
    wait_until(lambda: first_finding(jobs, waits)["evidence"]["slurm_reason"] == "BeginTime")
    found = first_finding(jobs, waits)
    assert (found["id"], found["severity"]) == ("job-pending", "fatal")
    assert "its earliest start is not yet here" in found["verdict"]
    assert found["evidence"]["expected_start"] is not None

    lab.run("scancel", waits.job_ids[0])
    found = first_finding(jobs, waits)
    assert (found["id"], found["evidence"]["slurm_state"]) == ("job-killed", "CANCELLED")
    assert "gradus submit --resume" in found["change"]

    late.ended()
    found = first_finding(jobs, late)
    assert found["id"] == "job-killed", (found, late.output())
    assert found["evidence"]["slurm_state"] == "TIMEOUT"
    assert "--time" in found["change"]
