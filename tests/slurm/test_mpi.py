"""The same recipe as several processes that srun or mpirun starts: same curve, same exit codes, a log per node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from gradus_command import rank_processes, status
from slurm.jobs import PATIENCE_SECONDS, Jobs, curve
from slurm.lab import Lab

pytestmark = pytest.mark.slow

MPIRUN = ("mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []))
TWO_RANKS = ("--set", "plan.mesh.replicate=2", "--set", "plan.micro_batch=4")


def same_curve(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in wanted], rel=1e-9)


def train(
    jobs: Jobs, starter: tuple[str, ...], *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*starter, sys.executable, "-m", "gradus", "train", *arguments],
        cwd=jobs.folder,
        env={**jobs.lab.environment, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, _opened_lab: Lab) -> list[dict[str, Any]]:
    jobs = Jobs(_opened_lab, tmp_path_factory.mktemp("calm"))
    return jobs.undisturbed(jobs.recipe(steps=6, plan={**PLAN, "mesh": {"replicate": 2}, "micro_batch": 4}), 2)


PLAN = {"workers": 0, "precision": "fp64", "compile": False, "mesh": {"replicate": 4}, "zero": 0, "micro_batch": 2}


@pytest.mark.parametrize(
    ("starter", "options", "nodes"),
    [
        (("srun", "-N2", "-n4"), (), 2),
        (("srun", "--mpi=pmi2", "-N2", "-n4", "--distribution=cyclic"), (), 2),
        # Two slurmd of one machine cannot both be servers of PMIx: they use the same folder for it.
        (("srun", "--mpi=pmix", "-N1", "-n2"), TWO_RANKS, 1),
        (("salloc", "--quiet", "-N2", "-n4", *MPIRUN, "-np", "4"), (), 2),
        # One process on each node, which starts the ranks of its node.
        (("srun", "-N2", "-n2"), ("--nproc", "2"), 2),
    ],
    ids=["srun", "pmi2-cyclic", "pmix", "mpirun", "one-for-each-node"],
)
def test_processes_that_were_started_together_train_as_one_machine_does(lab, tmp_path, calm, starter, options, nodes):
    jobs = Jobs(lab, tmp_path)
    done = train(jobs, starter, jobs.recipe(steps=6), "--run-id", "mpi", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    run = jobs.runs / "own" / "mpi"
    same_curve(curve(run), calm)
    assert status(run)["state"] == "finished"
    assert len(list(run.glob("attempts/1/logs/*.log"))) == nodes
    assert [path.name for path in jobs.runs.iterdir()] == ["own"]  # where they met is gone


SCRIPT = """\
import json, os, sys, torch.distributed as dist
dist.init_process_group("gloo")
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURMD_NODENAME")
every = [None] * dist.get_world_size()
dist.all_gather_object(every, {name: os.environ[name] for name in names})
if dist.get_rank() == 0:
    print(json.dumps(every))
dist.barrier()
dist.destroy_process_group()
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "3" else 0)
"""


@pytest.mark.parametrize(("code", "left_with"), [(0, 0), (93, 93), (7, 1)])
def test_a_script_has_torchruns_variables_and_its_exit_code_is_told(lab, tmp_path, code, left_with):
    jobs = Jobs(lab, tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = train(jobs, ("srun", "-N2", "-n4"), "--", "script.py", str(code))
    assert done.returncode == left_with, done.stdout + done.stderr
    ranks = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
    assert [int(rank["RANK"]) for rank in ranks] == [0, 1, 2, 3]
    assert [int(rank["LOCAL_RANK"]) for rank in ranks] == [0, 1, 0, 1]
    assert [int(rank["GROUP_RANK"]) for rank in ranks] == [0, 0, 1, 1]
    assert [rank["SLURMD_NODENAME"] for rank in ranks] == ["n1", "n1", "n2", "n2"]
    assert {(rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) for rank in ranks} == {("4", "2")}
    if code:
        assert "rank 3 on n2" in done.stderr


def started(jobs: Jobs, *starter: str, **environment: str) -> subprocess.Popen[str]:
    recipe = jobs.recipe(steps=500, plan={**PLAN, "mesh": {"replicate": 2}, "micro_batch": 4})
    return subprocess.Popen(
        [*starter, sys.executable, "-m", "gradus", "train", recipe, "--run-id", "mpi"],
        cwd=jobs.folder,
        env={**jobs.lab.environment, "OMP_NUM_THREADS": "1", "STEP_SECONDS": "0.1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until_step(jobs: Jobs, step: int, process: subprocess.Popen[str]) -> Path:
    run, end = jobs.runs / "own" / "mpi", time.monotonic() + PATIENCE_SECONDS
    while not (run / "metrics.jsonl").exists() or len(curve(run)) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.2)
    return run


def test_a_signal_to_all_tasks_is_a_stop_request_that_saves(lab: Lab, tmp_path: Path):
    jobs = Jobs(lab, tmp_path)
    process = started(jobs, "srun", "-N2", "-n2")
    run = until_step(jobs, 3, process)
    [job] = lab.run("squeue", "--noheader", "--format=%i").split()
    lab.run("scancel", "--signal=USR1", f"{job}.0")
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, out
    assert status(run)["state"] == "stopped"
    assert list((run / "checkpoints").glob("*/COMMITTED"))
    assert "gradus train --resume" in out


def test_a_rank_that_is_killed_is_named_and_the_others_do_not_hang(lab: Lab, tmp_path: Path):
    jobs = Jobs(lab, tmp_path)
    process = started(jobs, "srun", "-N2", "-n2")
    run = until_step(jobs, 3, process)
    os.kill(rank_processes(run)[1], signal.SIGKILL)
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1, out
    assert "rank 1 on n2 was killed by SIGKILL" in out
    assert status(run)["state"] == "failed"


def test_bad_input_is_said_once_and_leaves_nothing_behind(lab: Lab, tmp_path: Path):
    jobs = Jobs(lab, tmp_path)
    done = train(jobs, ("srun", "-N2", "-n4"), jobs.recipe(batch=-1))
    assert done.returncode == 2
    assert done.stderr.count("error: recipe.yaml") == 1
    assert not jobs.runs.exists()


@pytest.mark.parametrize("mpi", ["pmi2", "mpirun"])
def test_a_job_whose_cluster_says_mpi_trains_the_same_and_has_a_log_for_each_node(lab, tmp_path, calm, mpi):
    jobs = Jobs(lab, tmp_path)
    described = yaml.safe_load(jobs.cluster.read_text())
    described["scheduler"] |= {"launcher": "mpi", "mpi": mpi}
    jobs.cluster.write_text(yaml.safe_dump(described))
    run = jobs.submit(jobs.recipe(steps=6))
    same_curve(run.finished(), calm)
    nodes = json.loads((run.path / "attempts" / "1" / "job.json").read_text())["nodes"]
    assert {path.stem for path in run.path.glob("attempts/1/logs/*.log")} == set(nodes)
    assert run.decisions == ["finished"]
