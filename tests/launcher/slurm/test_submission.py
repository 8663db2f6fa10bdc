"""From what is typed to a request: sweeps, ranks on nodes, what a job waits for, and what of the shell counts."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from gradus.launcher.slurm.checks import Start
from gradus.launcher.slurm.description import JobDescription
from gradus.launcher.slurm.options import submission_variables
from gradus.launcher.slurm.requests import sweep_overrides
from gradus.launcher.slurm.submission import Job, Submitted, dependency_on, with_ranks_on_nodes
from gradus.planner.planning import fewest_nodes
from gradus.record.directory import RunDirectory
from gradus.record.status import Status, write_status
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe

FOUR = Cluster(name="c", nodes=4, cpu_cores=2, memory_gib=1)


def test_a_sweep_has_a_run_for_each_combination() -> None:
    assert sweep_overrides([]) == [[]]
    assert sweep_overrides(["optimizer.lr=1e-3,3e-3", "seed=1,2"]) == [
        ["optimizer.lr=0.001", "seed=1"],
        ["optimizer.lr=0.001", "seed=2"],
        ["optimizer.lr=0.003", "seed=1"],
        ["optimizer.lr=0.003", "seed=2"],
    ]
    assert sweep_overrides(['model.use="a, b",c']) == [['model.use="a, b"'], ['model.use="c"']]
    assert sweep_overrides(["plan.mesh={shard: 2},{replicate: 2}"])[1] == ['plan.mesh={"replicate": 2}']


@pytest.mark.parametrize("text", ["seed", "seed=", "=1,2", "name=a,b"])
def test_what_is_no_sweep_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        sweep_overrides([text])
    assert caught.value.details["field"] == "--sweep"


def test_all_nodes_have_as_many_ranks() -> None:
    assert with_ranks_on_nodes(FOUR, 8) == 2
    with pytest.raises(InputError, match="6 ranks cannot be shared out evenly among 4 nodes") as caught:
        with_ranks_on_nodes(FOUR, 6)
    assert "--nodes 3" in caught.value.hint


def test_a_job_waits_for_a_job_or_for_the_newest_job_of_a_run(run: RunDirectory, tmp_path) -> None:
    assert dependency_on("4711", tmp_path) == "afterok:4711"
    assert dependency_on("4711_3", tmp_path) == "afterok:4711_3"
    assert dependency_on("afterany:4711", tmp_path) == "afterany:4711"
    with pytest.raises(InputError, match="is in no queue"):
        dependency_on(run.id, tmp_path)
    run.job.mkdir()
    (run.job / "jobs.jsonl").write_text(
        '{"job_id": "12", "submitted_at": "2026-11-15T23:00:00+00:00", "after": null}\n'
    )
    assert dependency_on(run.id, tmp_path) == "afterok:12"
    write_status(run, Status("finished"))
    assert dependency_on(run.id, tmp_path) is None
    with pytest.raises(InputError, match="is not a run"):
        dependency_on("$(touch canary)", tmp_path)


def test_settings_of_the_shell_do_not_win_over_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_ACCOUNT", "SBATCH_NO_REQUEUE", "HF_TOKEN"):
        monkeypatch.setenv(name, "x")
    found = submission_variables(["--partition=gpu", "--time=01:00:00"])
    assert "SBATCH_PARTITION" not in found
    assert "SBATCH_TIMELIMIT" not in found
    assert "SBATCH_NO_REQUEUE" not in found
    assert found["SBATCH_ACCOUNT"] == "x", "what the header does not say is left to the shell"
    assert found["HF_TOKEN"] == "x", "a job has its user's variables"


def test_a_mesh_that_is_fixed_says_how_many_nodes_it_needs() -> None:
    mesh = {"replicate": 2, "shard": 3}
    recipe = Recipe.from_document(
        {"name": "r", "model": {"use": "gpt"}, "data": {"use": "stdlib-text"}, "batch": 6, "steps": 1}
        | {"plan": {"mesh": mesh, "zero": 1}}
    )
    gpus = FOUR.model_copy(update={"gpus_per_node": 4, "gpu": "H100-SXM"})
    assert fewest_nodes(recipe, gpus) == 2


def test_a_submitted_job_prints_as_a_line_without_its_script(run: RunDirectory) -> None:
    job = Job("#!/bin/bash\n", (run,), JobDescription(2, 4), FOUR, None, ())
    assert repr(Submitted("12", job)) == f"<job 12: 8 ranks on 2 nodes; {run.path}>"


def test_a_job_that_waits_for_another_has_no_start_that_slurm_could_know(run: RunDirectory) -> None:
    start = Start(datetime(2026, 11, 16, tzinfo=timezone.utc), "n1")
    job = Job("", (run,), JobDescription(1, 1), FOUR, start, ())
    assert Submitted("12", job).document()["starts_at"] is not None
    assert Submitted("12", replace(job, waits_for=("11",))).document()["starts_at"] is None
