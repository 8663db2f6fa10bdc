"""Before any rank of a job has started: what was asked for meanwhile counts, and what no file has comes along."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm.jobs import Jobs, Run
from slurm.lab import Lab

from gradus.launcher.slurm.stopping import STOP
from gradus.record.directory import RunDirectory
from gradus.record.stop import request_stop

pytestmark = pytest.mark.slow


@pytest.fixture
def jobs(lab: Lab, tmp_path: Path) -> Jobs:
    return Jobs(lab, tmp_path)


def test_a_stop_request_that_comes_while_a_job_is_starting_holds_it(jobs: Jobs) -> None:
    run = jobs.submit(jobs.recipe(steps=4, plan={"workers": 0}), "--sbatch=--begin=now+1hour", ranks=1, nodes=1)
    request_stop(RunDirectory(run.path), STOP)  # as `gradus runs stop` does once the job has its nodes
    jobs.lab.run("scontrol", "update", f"JobId={run.job_ids[0]}", "StartTime=now")
    run.until(lambda: all(word in run.in_queue() for word in ("PENDING", "held")))
    assert run.curve == []
    assert list((run.path / "attempts").iterdir()) == []
    assert "before any rank had started" in run.output()
    assert jobs.gradus("runs", "release", str(run.path), "--json").json["requested"] == "released"
    assert len(run.finished()) == 4


def test_a_run_that_was_stopped_and_is_submitted_again_goes_on(jobs: Jobs) -> None:
    run = jobs.submit(jobs.recipe(steps=4, plan={"workers": 0}), "--sbatch=--begin=now+1hour", ranks=1, nodes=1)
    request_stop(RunDirectory(run.path), STOP)
    assert jobs.gradus("runs", "cancel", str(run.path)).code == 0
    again = jobs.submit("recipe.yaml", "--resume", str(run.path), ranks=1, nodes=1)
    assert len(again.finished()) == 4


def test_arguments_that_look_like_secrets_reach_a_script_and_no_file(jobs: Jobs) -> None:
    (jobs.folder / "script.py").write_text(
        "import os, sys\nopen(f'told-{os.environ[\"RANK\"]}', 'w').write(' '.join(sys.argv[1:]))\n"
    )
    shape = ("--cluster", str(jobs.cluster), "--nodes", "2", "--nproc", "1")
    done = jobs.gradus("submit", *shape, "--json", "--", "script.py", "--api-key", "canary-81", "--steps", "3")
    assert done.code == 0, done.err
    run = Run(jobs.lab, Path(done.json["run"]))
    assert run.ended() == "finished", run.output()
    assert [(jobs.folder / f"told-{rank}").read_text() for rank in (0, 1)] == ["--api-key canary-81 --steps 3"] * 2
    for path in run.path.rglob("*"):
        assert not path.is_file() or b"canary-81" not in path.read_bytes(), path
