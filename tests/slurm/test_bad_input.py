"""What cannot run is refused before anything is submitted or written, with what to do instead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm.jobs import Jobs
from slurm.lab import Lab

from gradus.launcher.script import script_from
from gradus.launcher.slurm.requests import Wish, recipe_request, script_request
from gradus.launcher.slurm.submission import Request, planned_job
from gradus.schema.cluster import Cluster, Storage
from gradus.schema.errors import GradusError, InputError
from gradus.schema.recipe import Recipe


@pytest.fixture
def jobs(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """The lab's jobs, with this process in its environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", lab.environment["SLURM_CONF"])
    for name in [name for name in os.environ if name.startswith(("SLURM_JOB", "SBATCH_"))]:
        monkeypatch.delenv(name)
    return Jobs(lab, tmp_path)


def refusal(jobs: Jobs, wish: Wish, **cluster: Any) -> GradusError:
    """What a submission of the recipe is refused with; it has left nothing behind."""
    described = yaml.safe_load(jobs.cluster.read_text())
    scheduler = {**described["scheduler"], **cluster.pop("scheduler", {})}
    jobs.cluster.write_text(yaml.safe_dump({**described, **cluster, "scheduler": scheduler}))
    jobs.recipe()
    before = sorted(jobs.folder.rglob("*"))
    with pytest.raises(GradusError) as caught:
        planned_job(*recipe_request([Recipe.load("recipe.yaml")], Cluster.load(jobs.cluster), wish))
    assert sorted(jobs.folder.rglob("*")) == before
    assert jobs.lab.run("squeue", "-h") == ""
    assert caught.value.exit_code == 2
    return caught.value


TWO = Wish(nodes=2, nproc=2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"partition": "mian"}, "did you mean 'main'"),
        ({"time": "2d"}, "at most"),
        ({"nodelist": "n9"}, "no such node"),
        ({"exclude": "n[1-3]"}, "no nodes of the partition are as asked for"),
        ({"constraint": "gold"}, "no node has such a feature"),
        ({"reservation": "mine"}, "no such reservation"),
        ({"gres": "tpu:1"}, "scheduler.gres"),
        ({"mem": "900T"}, "memory"),
        ({"cpus_per_task": 64}, "not so many cores"),
        ({"options": ["--no-such-option"]}, "sbatch does not know an option"),
        ({"ntasks_per_node": 4}, "--nproc"),
    ],
    ids=str,
)
def test_what_slurm_has_not_is_refused_in_plain_words(jobs: Jobs, fields: dict[str, Any], words: str) -> None:
    error = refusal(jobs, TWO, scheduler=fields)
    assert words in f"{error.message} {error.hint}"


def test_more_nodes_than_there_are(jobs: Jobs) -> None:
    error = refusal(jobs, Wish(nodes=5, nproc=2))
    assert "--nodes: found 5, but partition main has 4 nodes" in error.message


def test_more_gpus_than_a_node_has(jobs: Jobs) -> None:
    (jobs.folder / "script.py").write_text("")
    cluster = Cluster.load(jobs.cluster).model_copy(update={"gpus_per_node": 4})
    request = script_request(script_from(["script.py"]), cluster, Wish(nodes=1, nproc=4))
    with pytest.raises(InputError, match="needs 4 GPUs on a node, but the nodes of main have 2"):
        planned_job(*request)


def test_a_job_to_wait_for_that_slurm_does_not_know(jobs: Jobs) -> None:
    error = refusal(jobs, Wish(nodes=2, nproc=2, after=["999999"]))
    assert "knows no job 999999" in error.message
    assert error.details["field"] == "--after"


def test_a_container_runtime_that_is_not_installed(jobs: Jobs) -> None:
    error = refusal(jobs, TWO, container={"runtime": "apptainer", "image": "ubuntu.sif"})
    assert error.details["field"] == "container.runtime"
    assert "not installed" in error.message


def test_a_scheduler_that_is_none(jobs: Jobs) -> None:
    error = refusal(jobs, TWO, scheduler={"kind": "local"})
    assert "no scheduler to submit to" in error.message


def test_a_controller_that_does_not_answer(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradus.launcher.slurm.checks._CONTROLLER_SECONDS", 0.0)
    jobs.lab.kill_controller()
    try:
        with pytest.raises(InputError, match="does not answer") as caught:
            recipe_request([Recipe.load(jobs.recipe())], Cluster.load(jobs.cluster), TWO)
    finally:
        jobs.lab.start_controller()
    assert "scontrol ping" in str(caught.value.hint)
    assert not jobs.runs.exists()


def test_a_run_directory_that_other_nodes_cannot_see(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen from a login node: a machine that is none of the nodes."""
    monkeypatch.setattr("socket.gethostname", lambda: "login1")
    error = refusal(jobs, TWO)
    assert "of this machine alone" in error.message
    assert error.details["field"] == "--runs"
    cluster = Cluster.load(jobs.cluster).model_copy(update={"storage": Storage(shared=str(jobs.folder))})
    planned_job(*recipe_request([Recipe.load("recipe.yaml")], cluster, TWO))


def test_a_machine_with_no_slurm_at_all(jobs: Jobs) -> None:
    jobs.recipe()
    tools = jobs.folder / "tools"
    tools.mkdir()
    done = jobs.gradus("submit", "recipe.yaml", "--cluster", str(jobs.cluster), "--json", PATH=str(tools))
    assert done.code == 2
    assert "no Slurm on this machine" in done.json["error"]["message"]
    assert not jobs.runs.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "a\nb"}, "should match pattern"),
        ({"name": "$(touch canary)"}, "should match pattern"),
        ({"name": "../elsewhere"}, "should match pattern"),
    ],
)
def test_a_recipe_whose_name_is_no_folder(jobs: Jobs, changes: dict[str, Any], words: str) -> None:
    jobs.recipe(**changes)
    with pytest.raises(InputError, match=words):
        planned_job(*recipe_request([Recipe.load("recipe.yaml")], Cluster.load(jobs.cluster), TWO))
    assert not list(jobs.folder.rglob("canary*"))


def test_the_same_command_works_when_nothing_is_wrong(jobs: Jobs) -> None:
    request, site = recipe_request([Recipe.load(jobs.recipe())], Cluster.load(jobs.cluster), TWO)
    assert isinstance(request, Request)
    job = planned_job(request, site)
    assert (job.description.nodes, job.description.ranks_per_node) == (2, 2)
    assert job.start is not None
    assert not jobs.runs.exists()
