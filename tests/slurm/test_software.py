"""Modules and packed environments in jobs of a real scheduler."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm.jobs import Jobs
from slurm.lab import Lab
from slurm.whereabouts import jobs_that_tell, told_by

pytestmark = pytest.mark.slow


@pytest.fixture
def jobs(lab: Lab, tmp_path: Path) -> Jobs:
    return jobs_that_tell(lab, tmp_path, "LOADEDMODULES", "OF_MODULE", "OF_FILE")


def with_environment(jobs: Jobs, **environment: Any) -> None:
    cluster = yaml.safe_load(jobs.cluster.read_text())
    storage = {"local": str(jobs.folder / "node-disk")}
    jobs.cluster.write_text(yaml.safe_dump({**cluster, "environment": environment, "storage": storage}))


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    (tmp_path / "modules" / "tool").mkdir(parents=True)
    (tmp_path / "modules" / "tool" / "1.2").write_text('#%Module\nsetenv OF_MODULE "it is there"\n')
    return tmp_path / "modules"


def test_ranks_on_all_nodes_have_the_modules_and_variables_of_the_cluster_file(jobs: Jobs, modules: Path) -> None:
    variables = {"OF_FILE": "a 'b' $(c)"}
    with_environment(jobs, module_use=[str(modules)], modules=["tool/1.2"], variables=variables)
    jobs.submit(jobs.recipe(steps=3), LMOD_ALLOW_ROOT_USE="yes").finished()
    for where in told_by(jobs):
        assert (where["OF_MODULE"], where["OF_FILE"]) == ("it is there", "a 'b' $(c)")
        assert where["LOADEDMODULES"] == "tool/1.2"
    assert [where["SLURMD_NODENAME"] for where in told_by(jobs)] == ["n1", "n1", "n2", "n2"]


def test_a_module_that_went_away_ends_the_job_with_its_name(jobs: Jobs, modules: Path) -> None:
    with_environment(jobs, module_use=[str(modules)], modules=["tool/1.2"])
    run = jobs.submit(jobs.recipe(steps=3), "--sbatch=--begin=now+1hour", LMOD_ALLOW_ROOT_USE="yes")
    (modules / "tool" / "1.2").unlink()
    [job] = run.job_ids
    jobs.lab.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    ended = jobs.lab.wait_for_state(job, "FAILED")
    assert ended["ExitCode"] == "93:0"
    assert "the module tool/1.2 could not be loaded" in run.output()


def test_a_packed_environment_is_unpacked_on_the_nodes_and_needs_its_original_no_more(
    jobs: Jobs, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = venv / f"lib/python3.{sys.version_info.minor}/site-packages"
    # torch and the rest stay where they are: 2 GiB are no matter for this test. gradus comes along.
    (packages / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (packages / "__editable__.gradus.pth").write_text(f"{Path(__file__).parents[2] / 'src'}\n")
    with_environment(jobs, venv=str(venv), pack=True)
    run = jobs.submit(jobs.recipe(steps=3), "--sbatch=--begin=now+1hour")
    venv.rename(tmp_path / "gone")
    jobs.lab.run("scontrol", "update", f"JobId={run.job_ids[0]}", "StartTime=now")
    run.finished()
    [unpacked] = (tmp_path / "node-disk").glob("gradus-*/environment-*[!k]")
    for where in told_by(jobs):
        assert where["python"] == f"{unpacked}/env/bin/python"
        assert where["base"] == f"{unpacked}/base"
        assert where["gradus"].startswith(f"{unpacked}/env/")
    assert (unpacked.stat().st_mode & 0o777) == 0o700
