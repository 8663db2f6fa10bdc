"""What Slurm would refuse, or would let wait for ever, is said before anything is submitted."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from gradus.hardware.slurm_site import Node, Partition, nodes_in_text, partitions_in_text, start_in_text
from gradus.launcher.slurm.checks import (
    Site,
    check_is_seen,
    check_limits,
    check_scheduler,
    chosen_partitions,
    file_system_of,
    fitted,
    read_site,
)
from gradus.launcher.slurm.options import Shape
from gradus.schema.cluster import Cluster, Storage
from gradus.schema.errors import InputError
from gradus.schema.scheduler import Scheduler

GPU = Partition("gpu", True, "UP", 4, 2, 0, 3600.0, None, False)
CPU = Partition("cpu", False, "UP", 8, None, 0, None, 600.0, False)
OFF = Partition("old", False, "DOWN", 8, None, 0, None, None, False)
NODES = tuple(Node(f"g{n}", f"host{n}", "IDLE", n > 1, ("gpu",), 64, 64, 1000, 4, 4, "a100") for n in range(1, 5))
SITE = Site((GPU, CPU, OFF), NODES)
CLUSTER = Cluster(name="c", nodes=4, gpus_per_node=4, cpu_cores=64, memory_gib=8, scheduler=Scheduler(kind="slurm"))


def refused(problem: InputError) -> tuple[str, object, object]:
    return problem.details["field"], problem.details["found"], problem.details.get("allowed")


def test_an_unknown_partition_is_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'gpu'") as caught:
        chosen_partitions(SITE, Scheduler(partition="gpus"))
    assert caught.value.exit_code == 2
    assert [p.name for p in chosen_partitions(SITE, Scheduler(partition="gpu,cpu"))] == ["gpu", "cpu"]
    assert chosen_partitions(SITE, Scheduler()) == [GPU]


def test_a_site_without_a_default_wants_a_name() -> None:
    with pytest.raises(InputError, match="this site has no default"):
        chosen_partitions(Site((CPU,), ()), Scheduler())


def test_a_partition_that_is_down_takes_nothing() -> None:
    with pytest.raises(InputError, match="it is down"):
        chosen_partitions(SITE, Scheduler(partition="old"))


def test_more_nodes_than_there_are_or_than_a_job_may_have() -> None:
    with pytest.raises(InputError, match="takes jobs of 2 nodes at most") as caught:
        check_limits(SITE, Scheduler(), 3)
    assert refused(caught.value) == ("--nodes", 3, 2)
    with pytest.raises(InputError, match="has 8 nodes") as caught:
        check_limits(SITE, Scheduler(partition="cpu"), 9)
    assert refused(caught.value) == ("--nodes", 9, 8)
    check_limits(SITE, Scheduler(partition="gpu,cpu"), 8)


def test_more_time_than_the_partition_allows() -> None:
    with pytest.raises(InputError, match="allows 01:00:00 at most") as caught:
        check_limits(SITE, Scheduler(time="61m"), 1)
    assert refused(caught.value)[0] == "--time"
    assert "requeued" in caught.value.hint
    assert check_limits(SITE, Scheduler(time="60m"), 1) == []
    check_limits(SITE, Scheduler(time="9d", partition="cpu"), 1)


def test_what_a_job_gets_that_says_nothing_is_noted() -> None:
    [note] = check_limits(SITE, Scheduler(), 2)
    assert "01:00:00" in note
    notes = check_limits(replace(SITE, nodes=NODES[:2]), Scheduler(time="1m"), 2)
    assert notes == ["only 1 of the 2 nodes are in service now: the job waits for the others"]


def test_gpus_are_compared_with_what_slurm_counts() -> None:
    shape = Shape(2, 8, 8, 128)
    with pytest.raises(InputError, match="needs 8 GPUs on a node, but the nodes of the partition have 4"):
        fitted(SITE, Scheduler(), shape)
    assert fitted(SITE, Scheduler(gres="gpu:h100:8"), replace(shape, cpus_per_node=64)) == (
        replace(shape, cpus_per_node=64),
        [],
    )
    uncounted = Site((GPU,), tuple(replace(node, gpus=0, gpus_free=0) for node in NODES))
    found, notes = fitted(uncounted, Scheduler(), shape)
    assert (found.gpus_per_node, found.cpus_per_node) == (0, 64)
    assert len(notes) == 2


def test_a_cluster_without_a_scheduler_is_told_from_one_with() -> None:
    with pytest.raises(InputError, match="no scheduler"):
        check_scheduler(CLUSTER.model_copy(update={"scheduler": Scheduler()}))


def test_no_slurm_here_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="no Slurm on this machine") as caught:
        read_site()
    assert "gradus train" in caught.value.hint


def mounted(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "mounts"
    file.write_text("\n".join(f"dev {line} rw 0 0" for line in ("/ overlay", *lines)) + "\n")
    return file


def test_the_innermost_file_system_counts(tmp_path: Path) -> None:
    mounts = mounted(tmp_path, "/scratch lustre", "/scratch/my\\040disk tmpfs")
    assert file_system_of(Path("/scratch/runs/not-there"), mounts) == ("lustre", "/scratch")
    assert file_system_of(Path("/scratch/my disk/x"), mounts) == ("tmpfs", "/scratch/my disk")
    assert file_system_of(Path("/scratchy"), mounts) == ("overlay", "/")


def test_runs_on_a_disk_of_this_machine_are_refused_unless_it_is_said_to_be_shared(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert file_system_of(runs)[0] in ("tmpfs", "overlay", "ext4", "xfs", "btrfs")
    with pytest.raises(InputError, match="of this machine alone") as caught:
        check_is_seen(runs, CLUSTER, SITE, Scheduler())
    assert caught.value.details["field"] == "--runs"
    assert "storage: {shared:" in caught.value.hint
    said = CLUSTER.model_copy(update={"storage": Storage(shared=str(tmp_path))})
    assert check_is_seen(runs, said, SITE, Scheduler()) == []


def test_nodes_that_are_this_very_machine_see_all_of_it(tmp_path: Path) -> None:
    here = Site((GPU,), tuple(replace(node, host=socket.gethostname()) for node in NODES))
    assert check_is_seen(tmp_path, CLUSTER, here, Scheduler()) == []


@pytest.mark.parametrize("name", ["new\nline", "back\\slash", "tab\t"])
def test_a_path_that_a_script_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="cannot be written into a batch script"):
        check_is_seen(Path("/shared") / name, CLUSTER, SITE, Scheduler())


# As `scontrol show partition` and `scontrol --details show node` of 22.05.8 print it.
PARTITION = """\
PartitionName=main
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=YES QoS=N/A
   DefaultTime=00:30:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=2 MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=n[1-4]
   OverTimeLimit=NONE PreemptMode=REQUEUE
   State=UP TotalCPUs=8 TotalNodes=4 SelectTypeParameters=NONE
"""
NODE = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=1 CPUEfctv=2 CPUTot=2 CPULoad=13.25
   ActiveFeatures=node1,left
   Gres=gpu:a100:2
   GresDrain=N/A
   GresUsed=gpu:a100:1(IDX:0)
   NodeAddr=127.0.0.1 NodeHostName=vm Port=14923 Version=22.05.8
   RealMemory=6026 AllocMem=0 FreeMem=15640 Sockets=2 Boards=1
   State=MIXED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=main,low

NodeName=n2 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=0.1
   Gres=(null)
   NodeAddr=127.0.0.1 NodeHostName=vm Port=14924 Version=22.05.8
   State=IDLE+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1
   Partitions=main
   Reason=a new State=IDLE disk [root@2026-11-15T23:00:00]
"""


def test_partitions_and_nodes_are_read_as_slurm_prints_them() -> None:
    [partition] = partitions_in_text(PARTITION)
    assert partition == Partition("main", True, "UP", 4, 2, 0, 86400.0, 1800.0, True)
    assert partition.most_nodes == 2
    first, second = nodes_in_text(NODE)
    assert (first.name, first.host, first.gpus, first.gpus_free, first.cpus_free) == ("n1", "vm", 2, 1, 1)
    assert (first.gpu_type, first.partitions, first.features) == ("a100", ("main", "low"), ("node1", "left"))
    assert (second.in_service, second.gpus, second.cpus_free) == (False, 0, 0)
    assert (second.state, second.reason) == ("IDLE+DRAIN", "a new State=IDLE disk")


def test_the_start_of_a_test_only_submission_is_read() -> None:
    text = "sbatch: Job 2 to start at 2026-11-15T23:08:18 using 1 processors on nodes n[1-2] in partition main\n"
    found = start_in_text(text)
    assert found is not None
    assert found[0].replace(tzinfo=None).isoformat() == "2026-11-15T23:08:18"
    assert found[1] == "n[1-2]"
    assert start_in_text("allocation failure: no") is None
