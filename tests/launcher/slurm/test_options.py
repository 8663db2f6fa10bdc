"""Options of a job: typed ones in a fixed order, any other passed through, and none that the script rests on."""

from __future__ import annotations

import shlex

import pytest

from gradus.launcher.slurm.options import (
    Shape,
    file_name,
    header_word,
    lead_seconds,
    sbatch_options,
    settled,
    shape_of,
    srun_options,
    with_options,
)
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.scheduler import Scheduler

SHAPE = Shape(nodes=2, ranks_per_node=4, gpus_per_node=4, cpus_per_node=32)


def header(scheduler: Scheduler, shape: Shape = SHAPE, **more: object) -> list[str]:
    return sbatch_options(scheduler, shape, name="run", output="job/%j.out", lead_seconds=60, **more)


def test_the_header_has_a_fixed_order_and_all_that_the_script_rests_on() -> None:
    given = {"time": "1h", "account": "me", "partition": "gpu", "mail_type": ["END", "FAIL"], "exclusive": "user"}
    assert header(Scheduler(**given)) == [
        *("--job-name=run", "--partition=gpu", "--account=me", "--time=01:00:00", "--cpus-per-task=32"),
        *("--mail-type=END,FAIL", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--gres=gpu:4", "--exclusive=user"),
        *("--output=job/%j.out", "--open-mode=append", "--signal=B:USR1@60", "--requeue"),
    ]
    again = Scheduler(**dict(reversed(given.items())))
    assert header(again) == header(Scheduler(**given))


def test_ranks_that_mpi_starts_are_tasks_of_their_own() -> None:
    options = header(Scheduler(launcher="mpi", mpi="pmix"))
    assert {"--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=8"} <= set(options)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (Scheduler(gres="gpu:a100:2"), ["--gres=gpu:a100:2"]),
        (Scheduler(gres="none"), []),
        (Scheduler(gpus_per_task="a100:4"), ["--gpus-per-task=a100:4"]),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants_it(scheduler: Scheduler, expected: list[str]) -> None:
    assert [option for option in header(scheduler) if "gpu" in option or "gres" in option] == expected


def test_a_sweep_is_an_array_with_a_limit() -> None:
    assert "--array=0-5%2" in header(Scheduler(array_limit=2), array=6)
    assert "--array=0-5" in header(Scheduler(), array=6)


def test_a_node_gives_as_many_cores_as_gpus_of_it_are_used() -> None:
    cluster = Cluster(name="c", nodes=4, gpus_per_node=8, cpu_cores=96, memory_gib=1)
    assert shape_of(cluster, 2, 8) == Shape(2, 8, 8, 96)
    assert shape_of(cluster, 2, 2) == Shape(2, 2, 2, 24)
    assert shape_of(cluster, 2, 16, ranks_per_gpu=2) == Shape(2, 16, 8, 96)
    assert shape_of(cluster.model_copy(update={"gpus_per_node": 0}), 1, 3) == Shape(1, 3, 0, 96)


@pytest.mark.parametrize(
    ("typed", "field", "value"),
    [
        ("--time=30", "time", "00:30:00"),
        ("-t 1-00:00:00", "time", "1-00:00:00"),
        ("--partition gpu", "partition", "gpu"),
        ("-pgpu", "partition", "gpu"),
        ("-A 'my account'", "account", "my account"),
        ("--comment=two words", "comment", "two words"),
        ("--comment=it's", "comment", "it's"),
        ("-c 4", "cpus_per_task", 4),
        ("--nice=-5", "nice", -5),
        ("--exclusive", "exclusive", True),
        ("--exclusive=user", "exclusive", "user"),
        ("--mem-per-cpu=2G", "mem_per_cpu", "2G"),
        ("--licenses=a:1", "options", ["--licenses=a:1"]),
        ("-L a:1", "options", ["--licenses=a:1"]),
        ("--spread-job", "options", ["--spread-job"]),
        ("--tmp=5 --hint=nomultithread", "options", ["--tmp=5", "--hint=nomultithread"]),
    ],
)
def test_options_as_sbatch_has_them_go_to_their_fields(typed: str, field: str, value: object) -> None:
    assert getattr(with_options(Scheduler(), [typed]), field) == value
    assert getattr(settled(Scheduler(options=[typed])), field) == value


def test_what_is_typed_wins_over_the_cluster_file() -> None:
    scheduler = Scheduler(time="2h", partition="cpu", options=["--tmp=5"])
    found = with_options(scheduler, ["--time=10", "--hint=nomultithread"])
    assert (found.time, found.partition, found.options) == ("00:10:00", "cpu", ["--tmp=5", "--hint=nomultithread"])


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--nodes=4", "use --nodes"),
        ("-N 4", "use --nodes"),
        ("--signal=USR2@5", "scheduler.lead"),
        ("--open-mode=truncate", "always append"),
        ("--array=0-3", "--sweep"),
        ("--wrap=rm", "writes the script itself"),
        ("--no-requeue", "scheduler.requeue: false"),
        ("--ntasks-per-node=4", "--nproc"),
        ("--gpus=4", "--nproc"),
        ("licenses", "an option of sbatch"),
        ("--time=", "an option of sbatch"),
        ("--partition", "an option of sbatch"),
        ("--time=soon", "such as 90m"),
        ("--account=a\nb", "on one line"),
        ("--cpus-per-task=many", "whole number"),
    ],
)
def test_what_gradus_decides_or_nobody_can_mean_is_refused_with_the_reason(typed: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        header(with_options(Scheduler(), [typed]))
    assert words in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("value", ["two words", 'a "quoted" one', "it's", "a#b", "back\\slash", "$(id) `id`", "ä b"])
def test_a_header_word_is_read_back_as_slurm_reads_it(value: str) -> None:
    """As its sources do (sbatch's opt.c, _get_argument): quotes of both kinds, and a backslash before anything."""
    word = header_word(f"--comment={value}")
    assert "\n" not in word
    assert shlex.split(word, comments=True) == [f"--comment={value}"]


def test_percent_in_a_path_is_no_symbol_for_slurm() -> None:
    assert file_name("/data/100%j") == "/data/100%%j"


def test_a_short_job_is_asked_to_stop_before_all_of_its_time_is_lead() -> None:
    assert lead_seconds(Scheduler(time="10h"), 120) == 120
    assert lead_seconds(Scheduler(time="2m"), 120) == 30
    assert lead_seconds(Scheduler(), 120, limit=60) == 15
    assert lead_seconds(Scheduler(time="2m", lead="90s"), 120) == 90


def test_tasks_get_all_variables_of_the_script_even_if_the_job_got_none() -> None:
    assert srun_options(Scheduler(export="NONE")) == ["--export=ALL"]
    assert srun_options(Scheduler(export="ALL", cpu_bind="cores", label=True)) == ["--cpu-bind=cores", "--label"]
