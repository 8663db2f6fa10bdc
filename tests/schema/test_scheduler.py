"""What a cluster file says about its scheduler: times in one form, and no value that could leave its line."""

from __future__ import annotations

import pytest

from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.scheduler import Scheduler, job_seconds, slurm_time

TEXT = "name: small\nnodes: 2\ncpu_cores: 4\nmemory_gib: 8\nscheduler: {kind: slurm, %s}\n"


@pytest.mark.parametrize(
    "written",
    ["90m", "1h30m", "5400s", "01:30:00", "1:30:00", "90", "90:00", "0-01:30:00", "0-1:30"],
)
def test_times_have_one_form_however_they_are_written(written: str) -> None:
    assert Scheduler(time=written).time == "01:30:00"
    assert Scheduler(time=Scheduler(time=written).time).time == "01:30:00"


@pytest.mark.parametrize(("seconds", "text"), [(59, "00:00:59"), (86400, "1-00:00:00"), (7 * 86400 + 1, "7-00:00:01")])
def test_a_time_is_read_as_it_is_written(seconds: float, text: str) -> None:
    assert slurm_time(seconds) == text
    assert job_seconds(text) == seconds
    assert job_seconds("UNLIMITED") == float("inf")


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        ("time: 90", "scheduler.time", "in quotes"),  # minutes to Slurm, a number to YAML
        ("time: 24:00:00", "scheduler.time", "in quotes"),  # YAML 1.1 makes 86400 of it
        ("time: soon", "scheduler.time", "such as 90m"),
        ('time: "0"', "scheduler.time", "above 0"),
        ('account: "a\\nb"', "scheduler.account", "on one line"),
        ('comment: "a\\tb"', "scheduler.comment", "on one line"),
        ('options: ["--licenses=a\\n#SBATCH --wrap=x"]', "scheduler.options.0", "on one line"),
        ("options: [licenses]", "scheduler.options.0", "an option of sbatch"),
        ("partition: ''", "scheduler.partition", "not empty"),
        ("mem: 4 GB", "scheduler.mem", "pattern"),
        ("partitoin: gpu", "scheduler.partitoin", "did you mean 'partition'"),
        ("launcher: mpirun", "scheduler.launcher", "torchrun"),
        ("cpus_per_task: 0", "scheduler.cpus_per_task", "at least 1"),
        ("lead: 2", "scheduler.lead", "such as 90s"),
        ("mem: 4G, mem_per_cpu: 1G", "scheduler", "mem or mem_per_cpu"),
        ("mpi: pmix", "scheduler", "launcher: mpi"),
    ],
)
def test_what_cannot_be_is_named_where_it_is_written(tmp_path, line: str, field: str, words: str) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(TEXT % line)
    with pytest.raises(InputError) as caught:
        Cluster.load(path)
    assert caught.value.details["field"] == field
    assert words in caught.value.message


def test_a_cluster_is_written_and_read_back_with_its_scheduler(tmp_path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(TEXT % "time: 1h, mail_type: [END, FAIL], exclusive: user, options: ['--licenses=a:1']")
    cluster = Cluster.load(path)
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster
