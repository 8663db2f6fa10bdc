"""The lab is a Slurm as sites have it, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm.lab import Lab, LabError, missing, parsed

from gradus import Cluster

HERE = Path(__file__).parent
as_root = pytest.mark.skipif(os.geteuid() != 0, reason=missing() or "")


def test_nodes_are_idle_with_their_gpus_and_features(lab: Lab) -> None:
    lines = lab.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T %G %f").splitlines()
    assert lines == [
        "n1 idle gpu:2 node1,left",
        "n2 idle gpu:2 node2,left",
        "n3 idle gpu:2 node3,right",
        "n4 idle gpu:2 node4,right",
    ]
    assert parsed(lab.run("scontrol", "show", "node", "-o", "n1"))["Gres"] == "gpu:2"


def test_its_cluster_file_says_so_too(lab: Lab) -> None:
    cluster = Cluster.load(lab.cluster_file)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.cpu_cores) == (4, 2, 2)
    assert (cluster.scheduler.kind, cluster.scheduler.partition) == ("slurm", "main")


def test_a_step_runs_on_two_nodes_and_sees_its_gpus(lab: Lab) -> None:
    line = "echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES"
    assert sorted(lab.run("srun", "-N2", "--gres=gpu:2", "sh", "-c", line).splitlines()) == ["n1 0 0,1", "n2 1 0,1"]


def test_two_jobs_on_a_node_get_different_gpus(lab: Lab, tmp_path: Path) -> None:
    line = f"echo $CUDA_VISIBLE_DEVICES > {tmp_path}/$SLURM_JOB_ID; sleep 100"
    jobs = [lab.sbatch("-w", "n1", "-n1", "--gres=gpu:1", wrap=line) for _ in range(2)]
    assert sorted(_text(tmp_path / job) for job in jobs) == ["0\n", "1\n"]


def test_more_nodes_than_there_are_is_refused_at_submission(lab: Lab) -> None:
    with pytest.raises(LabError, match="Node count specification invalid"):
        lab.sbatch("-N5", wrap="true")


@pytest.mark.parametrize("kind", ["pmi2", "pmix"])
def test_steps_start_under_mpi(lab: Lab, kind: str) -> None:
    variable = {"pmi2": "PMI_RANK", "pmix": "PMIX_RANK"}[kind]
    assert sorted(lab.run("srun", f"--mpi={kind}", "-N2", "-n4", "printenv", variable).split()) == ["0", "1", "2", "3"]


def test_arrays_constraints_and_reservations(lab: Lab) -> None:
    array = lab.sbatch("--array=0-2", wrap="sleep 100")
    assert len(lab.run("squeue", "-h", "-r", "-j", array).splitlines()) == 3
    assert lab.wait_for_state(lab.sbatch("-C", "node4", wrap="true"), "COMPLETED")["NodeList"] == "n4"
    where = ("StartTime=now", "Duration=10", "Users=root", "Nodes=n3", "Flags=IGNORE_JOBS")
    lab.run("scontrol", "create", "reservation", "ReservationName=ours", *where)
    assert lab.wait_for_state(lab.sbatch("--reservation=ours", wrap="true"), "COMPLETED")["NodeList"] == "n3"


def test_names_and_values_with_spaces_are_told_apart() -> None:
    line = "JobId=7 JobName=a b Reason=None ReqB:S:C:T=0:0:*:* TRES=cpu=1,node=1 Comment=x y=z Power=\n"
    assert parsed(line) == {
        "JobId": "7",
        "JobName": "a b",
        "Reason": "None",
        "ReqB:S:C:T": "0:0:*:*",
        "TRES": "cpu=1,node=1",
        "Comment": "x y=z",
        "Power": "",
    }


def test_a_dead_node_takes_all_its_processes_with_it(lab: Lab, tmp_path: Path) -> None:
    """Also those that left their session and their parent, but none of other nodes."""
    away = f"echo $$ > {tmp_path}/$SLURMD_NODENAME.away; exec sleep 1000"
    line = f"(setsid sh -c '{away}' &); echo $$ > {tmp_path}/$SLURMD_NODENAME.here; exec sleep 1000"
    (tmp_path / "step.sh").write_text(line)
    lab.sbatch("-w", "n1,n2", wrap=f"srun sh {tmp_path}/step.sh")
    pids = {name: int(_text(tmp_path / name)) for name in ("n1.here", "n1.away", "n2.here", "n2.away")}
    lab.kill_node("n2")
    alive = {name: _alive(pid) for name, pid in pids.items()}
    assert alive == {"n1.here": True, "n1.away": True, "n2.here": False, "n2.away": False}
    os.kill(pids["n1.away"], signal.SIGKILL)  # Slurm does not find it, and would wait for it for a minute


@pytest.mark.slow
def test_two_labs_know_nothing_of_each_other(lab: Lab) -> None:
    with Lab(nodes=1, gpus=0, requeue=False, accounting="filetxt") as other:
        assert "NODE_FAIL" not in other.run("sacct", "-c", "-n")
        here, there = lab.sbatch(wrap="sleep 100"), other.sbatch(wrap="sleep 100")
        lab.wait_for_state(here, "RUNNING")
        job = other.wait_for_state(there, "RUNNING")
        assert (job["NodeList"], job["Requeue"]) == ("n1", "0")
        other.run("scancel", there)
        other.wait_for_state(there, "CANCELLED")
        assert other.run("sacct", "-c", "-n", "-X", "-o", "JobID,State").split()[0] == there
        folder = other.folder
    assert _traces(folder) == []
    assert lab.job(here)["JobState"] == "RUNNING"


@as_root
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_nothing_is_left_of_a_lab_whose_owner_is_killed(how: signal.Signals, tmp_path: Path) -> None:
    """Neither the daemons nor a detached process of a job, nor a command that waits for the job."""
    (tmp_path / "step.sh").write_text(f"setsid sleep 1000 & touch {tmp_path}/$SLURMD_NODENAME; exec sleep 1000")
    line = f"echo $LAB > {tmp_path}/folder; srun -N2 sh {tmp_path}/step.sh"
    command = [sys.executable, str(HERE / "lab.py"), "--nodes=2", "--", "sh", "-c", line]
    owner = subprocess.Popen(command, start_new_session=True)
    folder = Path(_text(tmp_path / "folder").strip())
    for node in ("n1", "n2"):
        _appears(tmp_path / node)
    assert len(_traces(folder)) > 10  # the folder, 4 daemons, 2 steps with 2 processes each, and what waits for them
    owner.send_signal(how)
    owner.wait(30)
    end = time.monotonic() + 30
    while (left := _traces(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []


@as_root
def test_a_lab_that_cannot_open_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    wrong = Lab(nodes=1, settings={"SchedulerType": "sched/nonsense"})
    with pytest.raises(LabError, match=r"slurmctld.* ended at once(?s:.*)sched/nonsense"):
        wrong.open()
    far = Lab(tmp_path / ("x" * 100))
    with pytest.raises(LabError, match="a folder with a shorter name is needed"):
        far.open()
    assert _traces(wrong.folder) + _traces(far.folder) == []


@pytest.mark.slow
@pytest.mark.long  # what Slurm does, not what we do
@pytest.mark.parametrize("kind", ["lab", "cgroup_lab"])
def test_preemption_asks_the_steps_when_the_grace_time_begins_and_the_batch_shell_when_it_is_over(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    lab: Lab = request.getfixturevalue(kind)
    (tmp_path / "step.sh").write_text(
        f"trap 'date +%s >> {tmp_path}/step' TERM; touch {tmp_path}/up$SLURM_RESTART_COUNT-$SLURMD_NODENAME\n"
        "while true; do sleep 0.2; done"
    )
    (tmp_path / "job.sh").write_text(
        f"#!/bin/sh\ntrap 'date +%s >> {tmp_path}/batch' TERM USR1\nsrun sh {tmp_path}/step.sh &\n"
        "while true; do sleep 0.2; done\n"
    )
    options = ("--exclusive", "--signal=B:USR1@60", "--requeue", "--output=/dev/null")
    low = lab.run("sbatch", "--parsable", "-p", "low", "-N4", *options, str(tmp_path / "job.sh")).strip()
    for node in lab.nodes:
        _appears(tmp_path / f"up-{node}")
    high = lab.sbatch("-p", "high", "-N4", "--exclusive", wrap="true")
    lab.wait_for_state(high, "COMPLETED", timeout=120)
    asked_step, asked_batch = (int(_text(tmp_path / name).split()[0]) for name in ("step", "batch"))
    assert asked_batch - asked_step >= 25  # the grace time is 30 s
    assert lab.wait_for_state(low, "RUNNING", timeout=60)["Restarts"] == "1"


@pytest.mark.slow
def test_the_job_of_a_dead_node_is_requeued(lab: Lab, tmp_path: Path) -> None:
    line = f"srun sh -c 'touch {tmp_path}/$SLURMD_NODENAME.$SLURM_RESTART_COUNT; exec sleep 1000'"
    job = lab.sbatch("-w", "n1,n2", "--requeue", wrap=line)
    for node in ("n1", "n2"):
        _appears(tmp_path / f"{node}.")
    lab.kill_node("n2")
    lab.wait_for_state(job, "PENDING", timeout=120)
    assert lab.node_states()["n2"] == "down*"
    lab.start_node("n2")
    _appears(tmp_path / "n2.1")
    assert lab.wait_for_state(job, "RUNNING")["Restarts"] == "1"


@pytest.mark.slow
def test_a_job_outlives_the_controller(lab: Lab, tmp_path: Path) -> None:
    job = lab.sbatch(wrap=f"while [ ! -e {tmp_path}/end ]; do sleep 0.2; done")
    before = lab.wait_for_state(job, "RUNNING")
    lab.kill_controller()
    assert "DOWN" in lab.run("scontrol", "ping", check=False)
    lab.start_controller()
    assert lab.wait_for_state(job, "RUNNING")["StartTime"] == before["StartTime"]
    (tmp_path / "end").touch()
    assert lab.wait_for_state(job, "COMPLETED")["Restarts"] == "0"


@pytest.mark.slow
def test_steps_are_in_cgroups_of_their_own_lab(cgroup_lab: Lab, tmp_path: Path) -> None:
    with Lab(nodes=1, proctrack="cgroup") as other:
        groups = []
        for number, one in enumerate((cgroup_lab, other)):
            one.sbatch("-w", "n1", wrap=f"echo $$ > {tmp_path}/{number}; sleep 100")
            lines = Path(f"/proc/{_text(tmp_path / str(number)).strip()}/cgroup").read_text().splitlines()
            groups += [line.partition(":freezer:")[2] for line in lines if ":freezer:" in line]
        labs, rest = zip(*(group.split("/slurm_n1/") for group in groups), strict=True)
        assert len(set(labs)) == 2
        assert all(inside.startswith("uid_0/job_") for inside in rest)
        folder = other.folder
    assert _traces(folder) == []
    assert not Path(f"/sys/fs/cgroup/freezer{labs[1]}").exists()


@as_root
@pytest.mark.slow
@pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])
def test_how_the_machine_itself_uses_cgroups_does_not_matter(proctrack: str) -> None:
    line = (
        "mount -t tmpfs nothing /sys/fs/cgroup;"
        f" {sys.executable} {HERE}/lab.py --nodes=2 --proctrack={proctrack} -- srun -N2 printenv SLURMD_NODENAME"
    )
    done = subprocess.run(["unshare", "--mount", "sh", "-c", line], capture_output=True, text=True, timeout=120)
    if "no proctrack/cgroup here" in done.stderr:
        pytest.skip(done.stderr)
    assert sorted(done.stdout.split()) == ["n1", "n2"], done.stderr


@as_root
@pytest.mark.slow
def test_loopback_is_enough_and_the_name_of_the_machine_need_not_resolve(tmp_path: Path) -> None:
    up = "from isolation import interface_up; interface_up('lo')"
    line = (
        f'hostname no-such-name; cd {HERE}; {sys.executable} -c "{up}"; cat /proc/net/fib_trie > {tmp_path}/before;'
        f" {sys.executable} lab.py --nodes=2 -- srun -N2 printenv SLURMD_NODENAME;"
        f" cat /proc/net/fib_trie > {tmp_path}/after"
    )
    done = subprocess.run(["unshare", "--net", "--uts", "sh", "-c", line], capture_output=True, text=True, timeout=120)
    assert sorted(done.stdout.split()) == ["n1", "n2"], done.stderr
    assert (tmp_path / "before").read_text() == (tmp_path / "after").read_text()


def _traces(folder: Path) -> list[str]:
    """The lab's folder, its cgroup, and every process that was told of it."""
    found = [str(folder)] if folder.exists() else []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told = process.joinpath("environ").read_bytes() + process.joinpath("cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in told:
            found.append(f"process {process.name}: {told[-200:]!r}")
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _appears(path: Path, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear: {os.listdir(path.parent)}"
        time.sleep(0.05)


def _text(path: Path) -> str:
    _appears(path)
    while not (text := path.read_text()).endswith("\n"):  # made, and not yet written
        time.sleep(0.01)
    return text
