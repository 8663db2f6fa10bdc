"""Who a process is among those that srun or mpirun has started with the same command, and which rank it becomes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gradus.launcher import gathering
from gradus.launcher.gathering import Guest, Member, gathered, places
from gradus.launcher.single_rank import failure_table
from gradus.launcher.together import Together, started_together
from gradus.launcher.torchrun import deaths_in_log
from gradus.schema.errors import InputError

# As Slurm 22.05 and Open MPI 4.1 set them.
TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
}
BATCH_SHELL = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "1563557889",
    "PMIX_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1563557888.0;tcp://10.0.0.2:53431",
}


def test_a_task_of_a_step_with_several_is_one_of_them():
    assert started_together(TASK) == Together(2, 4, "srun", "srun-7.3.0")


def test_a_batch_shell_is_alone_though_its_job_has_tasks():
    assert started_together(BATCH_SHELL) is None


def test_a_shell_in_a_step_of_one_task_is_alone():
    assert started_together({**TASK, "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_a_login_shell_is_alone():
    assert started_together({}) is None


def test_a_requeued_job_has_another_key():
    assert started_together({**TASK, "SLURM_RESTART_COUNT": "1"}) != started_together(TASK)


def test_mpiruns_variables_come_before_those_of_the_helpers_that_it_started_by_srun():
    found = started_together({**TASK, **OPEN_MPI, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    assert found is not None
    assert (found.process, found.processes, found.started_by) == (1, 3, "mpirun")


def test_all_processes_of_one_mpirun_have_one_key_and_those_of_another_have_another():
    first, second = (started_together({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": rank}) for rank in "01")
    other = started_together({**OPEN_MPI, "PMIX_NAMESPACE": "99"})
    assert first is not None
    assert second is not None
    assert other is not None
    assert first.key == second.key != other.key


def test_pmi2_under_srun_is_what_srun_says():
    found = started_together({**TASK, "PMI_RANK": "2", "PMI_SIZE": "4", "PMI_JOBID": "7.3"})
    assert found == started_together(TASK)


def test_mpich_is_known_by_its_own_variables():
    found = started_together({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_JOBID": "kvs_1"}, ["gradus", "train", "r.yaml"])
    assert found is not None
    assert (found.process, found.processes, found.leads) == (0, 2, True)


@pytest.mark.parametrize("mark", ["GRADUS_RUN", "TORCHELASTIC_RUN_ID"])
def test_what_a_rank_starts_is_not_taken_for_one_of_several(mark):
    assert started_together({**TASK, mark: "x"}) is None


def member(process: int, node: str, gpus: tuple[str, ...] = (), cores: tuple[int, ...] = (0, 1, 2, 3)) -> Member:
    return Member(process, node, f"boot-{node}", 1, gpus, cores)


def test_each_rank_is_given_once_and_those_of_a_node_are_neighbours_however_tasks_were_dealt_out():
    cyclic = [member(0, "n1"), member(1, "n2"), member(2, "n1"), member(3, "n2")]
    found = places(cyclic)
    assert [found[process].first_rank for process in range(4)] == [0, 2, 1, 3]
    assert [found[process].local_rank for process in range(4)] == [0, 0, 1, 1]
    assert [found[process].node for process in range(4)] == [0, 1, 0, 1]
    assert {place.world_size for place in found.values()} == {4}


def test_nodes_may_have_different_numbers_of_tasks():
    found = places([member(0, "n1"), member(1, "n1"), member(2, "n2")])
    assert [(found[p].first_rank, found[p].local_rank, found[p].local_size) for p in range(3)] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 0, 1),
    ]


def test_a_process_that_sees_one_gpu_of_its_own_is_told_apart_from_those_that_see_all():
    own = places([member(0, "n1", ("GPU-a",)), member(1, "n1", ("GPU-b",))])
    shared = places([member(0, "n1", ("GPU-a", "GPU-b")), member(1, "n1", ("GPU-a", "GPU-b"))])
    alone = places([member(0, "n1", ("GPU-a",)), member(1, "n2", ("GPU-b",))])
    assert own[1].own_gpu
    assert not shared[1].own_gpu
    assert not alone[1].own_gpu  # its local rank is 0 anyway


def test_cores_of_its_own_are_told_apart_from_shared_ones():
    assert places([member(0, "n1", cores=(0,)), member(1, "n1", cores=(1,))])[1].own_cores
    assert not places([member(0, "n1"), member(1, "n1")])[1].own_cores


def test_one_process_on_each_node_starts_several_ranks():
    found = places([member(0, "n1"), member(1, "n2")], each=4)
    assert [(place.first_rank, place.ranks, place.world_size) for place in found.values()] == [(0, 4, 8), (4, 4, 8)]


def test_a_rank_that_died_is_read_back_as_torchrun_would_tell_it():
    log = failure_table(1, 1, 77, 1) + "[rank0]: words\n" + failure_table(0, 0, 78, -9)
    assert {(death.rank, death.exit_code) for death in deaths_in_log(log)} == {(1, 1), (0, -9)}


def test_processes_meet_in_the_folder_of_runs_and_leave_nothing_there(tmp_path: Path):
    runs = tmp_path / "runs"
    leader, other = (Together(process, 2, "srun", "srun-1.0.0") for process in range(2))
    got = []

    def guest() -> None:
        visitor = Guest(other, runs)
        invitation = visitor.invitation()
        got.append(invitation)
        visitor.tell(3, {1: ["bye"]})
        visitor.wait_until_over(60)

    thread = threading.Thread(target=guest)
    thread.start()
    with gathered(leader, runs) as gathering_:
        own = gathering_.invite(Path("/runs/r"), 1)
        assert [member_.process for member_ in gathering_.members] == [0, 1]
        while not gathering_.left():
            pass
        [left] = gathering_.left().values()
    thread.join(60)
    assert (left.process, left.code, left.said) == (1, 3, {1: ["bye"]})
    assert own.place.first_rank == 0
    assert got[0].place.first_rank == 1
    assert (got[0].run, got[0].address, got[0].port) == ("/runs/r", "127.0.0.1", own.port)
    assert list(tmp_path.iterdir()) == []


def test_the_others_learn_that_process_0_has_refused(tmp_path: Path):
    leader, other = (Together(process, 2, "srun", "srun-1.0.0") for process in range(2))
    got = []
    thread = threading.Thread(target=lambda: got.append(Guest(other, tmp_path).invitation()))
    thread.start()
    with pytest.raises(InputError, match="a bad recipe"), gathered(leader, tmp_path):
        raise InputError("a bad recipe")
    thread.join(60)
    assert got == [None]


def test_a_folder_that_others_do_not_see_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(gathering, "_COME_SECONDS", 0.3)
    with pytest.raises(InputError, match="number 1, 2") as error, gathered(Together(0, 3, "srun", "k"), tmp_path):
        pass
    assert "--runs" in (error.value.hint or "")
    with pytest.raises(InputError, match="process 0 has not been seen"):
        Guest(Together(2, 3, "srun", "k"), tmp_path / "elsewhere").invitation()


def test_a_leader_that_dies_is_noticed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(gathering, "_SILENT_SECONDS", 0.3)
    folder = tmp_path / ".together-k"
    folder.mkdir()
    (folder / "sign.json").write_text('{"count": 1}')
    with pytest.raises(InputError, match="gives no sign any more"):
        Guest(Together(1, 2, "srun", "k"), tmp_path).invitation()


def test_nproc_must_agree_with_what_was_started(tmp_path: Path):
    together = Together(0, 2, "srun", "k")
    on_one_node = gathering.Gathering(together, tmp_path, [member(0, "n1"), member(1, "n1")])
    assert on_one_node.ranks(None) == on_one_node.ranks(2) == 2
    with pytest.raises(InputError, match="each becomes a rank"):
        on_one_node.ranks(4)
    one_each = gathering.Gathering(together, tmp_path, [member(0, "n1", ("a", "b")), member(1, "n2", ("c", "d"))])
    assert one_each.ranks(None) == 4
    assert one_each.ranks(3) == 6


def test_the_cluster_is_what_the_processes_have(tmp_path: Path):
    members = [member(0, "n1", ("a",), (0,)), member(1, "n1", ("b",), (1,)), member(2, "n2", ("c",)), member(3, "n2")]
    found = gathering.Gathering(Together(0, 4, "srun", "k"), tmp_path, members).cluster(None)
    assert (found.nodes, found.gpus_per_node) == (2, 2)


def test_across_machines_nobody_is_sent_to_loopback(tmp_path: Path, monkeypatch):
    members = [member(0, "n1"), member(1, "n2")]
    gathering_ = gathering.Gathering(Together(0, 2, "mpirun", "k"), tmp_path, members)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setattr(gathering, "own_address", lambda: ("127.0.1.1", "host name n1", None))
    with pytest.raises(InputError, match=r"127\.0\.1\.1"):
        gathering_.invite(Path("/runs/r"), 1)
    monkeypatch.setattr(gathering, "own_address", lambda: ("10.0.0.1", "host name n1", None))
    assert gathering_.invite(Path("/runs/r"), 1).address == "10.0.0.1"
    assert os.listdir(tmp_path)
