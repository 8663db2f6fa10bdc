"""Every typed option arrives: Slurm itself says of a job, or a step of itself, what the cluster file said."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from slurm.lab import Lab

from gradus.hardware.slurm_command import records
from gradus.launcher.slurm.options import Shape, file_name, header_word, sbatch_options, srun_options, with_options
from gradus.schema.scheduler import Scheduler

NASTY = """two words, "double", 'single', $(touch canary) `touch canary`; # \\ é"""


TWO_NODES = Shape(2, 1, 0, 2)


def script_of(scheduler: Scheduler, shape: Shape, command: str, output: str) -> str:
    options = sbatch_options(scheduler, shape, name="run", output=output, lead_seconds=60)
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {header_word(option)}" for option in options), command, ""])


def submitted(lab: Lab, folder: Path, command: str = "true", shape: Shape = TWO_NODES, **fields: Any) -> str:
    script = script_of(Scheduler(kind="slurm", **fields), shape, command, str(folder / "out"))
    return lab.run("sbatch", "--parsable", input=script, cwd=folder).strip()


def shown(lab: Lab, folder: Path, **fields: Any) -> dict[str, str]:
    """What `scontrol show job` says of a job that waits."""
    job = submitted(lab, folder, **{"begin": "now+1hour", **fields})
    return records(lab.run("scontrol", "show", "job", job))[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"partition": "low"}, {"Partition": "low"}),
        ({"account": "my account"}, {"Account": "my account"}),
        ({"time": "1h30m"}, {"TimeLimit": "01:30:00"}),
        ({"time": "0-12"}, {"TimeLimit": "12:00:00"}),
        ({"constraint": "left"}, {"Features": "left"}),
        ({"nodelist": "n3"}, {"ReqNodeList": "n3"}),
        ({"exclude": "n[1-2]"}, {"ExcNodeList": "n[1-2]"}),
        ({"begin": "2030-01-01T00:00:00"}, {"EligibleTime": "2030-01-01T00:00:00"}),
        ({"gres": "gpu:1"}, {"TresPerNode": "gres:gpu:1"}),
        ({"gpus_per_task": "2"}, {"TresPerTask": "gres:gpu:2"}),
        ({"cpus_per_task": 1}, {"CPUs/Task": "1", "NumCPUs": "2"}),
        ({"mem": "100M"}, {"MinMemoryNode": "100M"}),
        ({"mem_per_cpu": "50M"}, {"MinMemoryCPU": "50M"}),
        ({"exclusive": True}, {"OverSubscribe": "NO"}),
        ({"exclusive": "user"}, {"OverSubscribe": "USER"}),
        ({"switches": "1@00:05:00"}, {"Switches": "1@00:05:00"}),
        ({"job_name": NASTY}, {"JobName": NASTY}),
        ({"comment": NASTY}, {"Comment": NASTY}),
        (
            {"mail_type": ["END", "FAIL"], "mail_user": "a@b.example"},
            {"MailType": "END,FAIL", "MailUser": "a@b.example"},
        ),
        ({"nice": 7}, {"Nice": "7"}),
        ({"error": "/tmp/a b.err"}, {"StdErr": "/tmp/a b.err"}),
        ({"output": "/tmp/a b.out"}, {"StdOut": "/tmp/a b.out"}),
        ({"requeue": False}, {"Requeue": "0"}),
        ({"requeue": True}, {"Requeue": "1"}),
        ({"ntasks": 2, "ntasks_per_node": 1}, {"NumTasks": "2", "NtasksPerN:B:S:C": "1:0:*:*"}),
        ({"options": ["--contiguous"]}, {"Contiguous": "1"}),
        ({"options": ["--threads-per-core=1", "--delay-boot=5"]}, {"DelayBoot": "00:05:00"}),
    ],
    ids=str,
)
def test_an_option_of_the_cluster_file_is_what_slurm_has_of_the_job(
    lab: Lab, tmp_path: Path, fields: dict[str, Any], expected: dict[str, str]
) -> None:
    found = shown(lab, tmp_path, **fields)
    assert {name: found.get(name) for name in expected} == expected
    assert (found["NumNodes"], found["JobState"]) == ("2-2", "PENDING")
    assert not list(tmp_path.glob("canary*"))


def test_the_same_options_typed_as_sbatch_has_them(lab: Lab, tmp_path: Path) -> None:
    typed = ["-p low", "--time=90", "-C left", "--comment=two words", "--contiguous"]
    scheduler = with_options(Scheduler(kind="slurm", begin="now+1hour"), typed)
    job = lab.run("sbatch", "--parsable", input=script_of(scheduler, Shape(1, 1, 0, 1), "true", "/dev/null")).strip()
    found = records(lab.run("scontrol", "show", "job", job))[0]
    assert (found["Partition"], found["TimeLimit"], found["Features"]) == ("low", "01:30:00", "left")
    assert (found["Comment"], found["Contiguous"]) == ("two words", "1")


def test_a_dependency_and_a_reservation(lab: Lab, tmp_path: Path) -> None:
    first = submitted(lab, tmp_path, begin="now+1hour")
    assert shown(lab, tmp_path, dependency=f"afterok:{first}")["Dependency"] == f"afterok:{first}(unfulfilled)"
    lab.run(
        *("scontrol", "create", "reservation", "ReservationName=mine", "Users=root", "Nodes=n4"),
        *("StartTime=now+60", "Duration=10"),
    )
    found = shown(lab, tmp_path, shape=Shape(1, 1, 0, 1), reservation="mine")
    lab.run("scancel", found["JobId"])  # before the reservation goes
    assert found["Reservation"] == "mine"


def test_of_several_partitions_all_are_tried(lab: Lab, tmp_path: Path) -> None:
    assert set(shown(lab, tmp_path, partition="low,main")["Partition"].split(",")) == {"low", "main"}


def test_gpus_and_cores_of_the_plan(lab: Lab, tmp_path: Path) -> None:
    found = shown(lab, tmp_path, shape=Shape(2, 2, 2, 2))
    assert (found["TresPerNode"], found["CPUs/Task"], found["NumTasks"]) == ("gres:gpu:2", "2", "2")


def test_tasks_of_mpi_are_the_ranks(lab: Lab, tmp_path: Path) -> None:
    found = shown(lab, tmp_path, shape=Shape(2, 2, 0, 2), launcher="mpi")
    assert (found["NumTasks"], found["CPUs/Task"], found["NtasksPerN:B:S:C"]) == ("4", "1", "2:0:*:*")


def test_what_only_srun_knows_is_what_the_step_sees(lab: Lab, tmp_path: Path) -> None:
    scheduler = Scheduler(kind="slurm", distribution="cyclic", cpu_bind="cores", label=True, export="NONE")
    # The whole of a user's environment is not there; what the script itself exports reaches its tasks all the same.
    command = f"export OWN=here; srun {shlex.join(srun_options(scheduler))} env"
    text = script_of(scheduler, Shape(2, 1, 0, 2), command, str(tmp_path / "out"))
    job = lab.run("sbatch", "--parsable", input=text, cwd=tmp_path, env={"SECRET_OF_THE_SHELL": "x"}).strip()
    lab.wait_for_state(job, "COMPLETED")
    lines = (tmp_path / "out").read_text().splitlines()
    assert {line.partition(":")[0] for line in lines} == {"0", "1"}, "each line begins with its task"
    variables = {line.partition(": ")[2] for line in lines}
    assert {"OWN=here", "SLURM_DISTRIBUTION=cyclic", "SLURM_CPU_BIND_TYPE=mask_cpu:"} <= variables
    assert not any(variable.startswith("SECRET_OF_THE_SHELL") for variable in variables)


def test_the_file_that_a_job_prints_to_may_have_any_name(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "100% $(touch canary) 'a' \"b\" #"
    folder.mkdir()
    scheduler = Scheduler(kind="slurm")
    text = script_of(scheduler, Shape(1, 1, 0, 1), "echo said", file_name(str(folder)) + "/%j.out")
    job = lab.run("sbatch", "--parsable", input=text, cwd=tmp_path).strip()
    lab.wait_for_state(job, "COMPLETED")
    assert (folder / f"{job}.out").read_text() == "said\n"
    assert not list(tmp_path.rglob("canary*"))
