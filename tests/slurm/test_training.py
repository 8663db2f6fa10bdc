"""Training on nodes of a real scheduler is training: the same ranks, the same numbers, wherever it was started from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slurm.jobs import Jobs, Run, curve, kill
from slurm.lab import Lab
from slurm.recovery_cases import LONGER, TAKING_ITS_TIME, Ground, recipe

pytestmark = pytest.mark.slow
STEPS = 15

WHO = """\
import json, os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES")
told = {name: os.environ.get(name) for name in names} | {"cores": sorted(os.sched_getaffinity(0))}
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(told))
"""


@pytest.fixture(scope="module")
def ground(_opened_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """For the curves of runs on this machine, each trained once."""
    return Ground(_opened_lab, tmp_path_factory.mktemp("ground"))


@pytest.fixture
def jobs(lab: Lab, tmp_path: Path) -> Jobs:
    return Jobs(lab, tmp_path)


@pytest.mark.parametrize("nodes", [2, 4])
def test_every_rank_is_there_once_with_the_devices_of_its_node(jobs: Jobs, nodes: int) -> None:
    """A script that expects torchrun, on nodes with two GPUs."""
    (jobs.folder / "who.py").write_text(WHO)
    (jobs.folder / "who").mkdir()
    cluster = ("--cluster", str(jobs.lab.cluster_file), "--nodes", str(nodes), "--nproc", "2")
    done = jobs.gradus("submit", *cluster, "--json", "--", "who.py", str(jobs.folder / "who"))
    assert done.code == 0, done.err
    run = Run(jobs.lab, Path(done.json["run"]))
    assert run.ended() == "finished", run.output()
    told = {int(path.name): json.loads(path.read_text()) for path in (jobs.folder / "who").iterdir()}
    assert sorted(told) == list(range(2 * nodes))
    for rank, variables in told.items():
        assert variables["RANK"] == str(rank)
        assert variables["LOCAL_RANK"] == str(rank % 2)
        assert variables["SLURMD_NODENAME"] == f"n{rank // 2 + 1}"
        assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == (str(2 * nodes), "2")
        assert variables["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert len(variables["cores"]) == 1, "each rank keeps to its share of the node's two cores"
    assert sorted(path.name for path in run.path.glob("attempts/1/logs/*.log")) == [
        f"n{n + 1}.log" for n in range(nodes)
    ]


def test_two_nodes_compute_what_one_machine_does(jobs: Jobs, ground: Ground) -> None:
    assert jobs.submit(recipe(jobs, 4, steps=STEPS)).finished() == ground.calm(4, STEPS)


def test_four_nodes_compute_what_one_process_does(jobs: Jobs, ground: Ground) -> None:
    """On another number of ranks, sums come in another order: float64 within 1e-9."""
    there = jobs.submit(recipe(jobs, 8, steps=STEPS), nodes=4).finished()
    for row, alone in zip(there, ground.calm(1, STEPS), strict=True):
        for name, value in alone.items():
            assert row[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize("inside", [("salloc",), ("srun", "--ntasks=1")])
def test_train_uses_the_nodes_of_the_allocation_that_it_is_in(
    jobs: Jobs, ground: Ground, inside: tuple[str, ...]
) -> None:
    file = recipe(jobs, 4, steps=STEPS)
    train = (sys.executable, "-m", "gradus", "train", file, "--nproc", "2", "--json", "--run-id", "inside")
    started = ("salloc", "--nodes=2", "--time=10", *(() if inside == ("salloc",) else inside))
    done = subprocess.run(
        [*started, *train], cwd=jobs.folder, env=jobs.lab.environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    run = jobs.runs / "own" / "inside"
    assert curve(run) == ground.calm(4, STEPS)
    assert len(list(run.glob("attempts/1/logs/n*.log"))) == 2


def test_the_same_holds_where_processes_are_tracked_by_cgroups(cgroup_lab: Lab, ground: Ground, tmp_path: Path) -> None:
    """Signals reach other processes there: what stops all steps of a job, and what kills a rank."""
    jobs = Jobs(cgroup_lab, tmp_path)
    run = jobs.submit(recipe(jobs, 4, steps=LONGER), **TAKING_ITS_TIME)
    run.until(lambda: run.saved and run.ranks)
    cgroup_lab.run("scancel", "--signal=TERM", run.job_ids[0])
    run.until(lambda: run.ledger and run.curve[-1]["step"] > run.ledger[0]["step_reached"])
    kill(run.ranks[3])
    assert run.finished() == ground.calm(4, LONGER)
    assert run.decisions == ["requeue", "again", "finished"]
