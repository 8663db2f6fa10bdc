"""`workers: auto`: as many workers as keep up, by what the first micro-batches took, within the cores of the rank."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import trained
from user_runs import line_recipe

from gradus.data.loader import Indexed, Loader, Slices
from gradus.data.worker_count import MEASURED, decided
from gradus.data.workers import WorkerFailed
from gradus.hardware.rank_cores import cores_of_rank
from gradus.parallel.world import alone
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan


@pytest.mark.parametrize(
    ("clock_ms", "processor_ms", "cores", "workers", "reason"),
    [
        (0.2, 0.2, 8, 0, "no worker: a micro-batch is fetched in 0.2 ms"),
        (9, 9, 8, 1, "1 worker: a micro-batch is fetched in 9 ms by one worker; enough for one every 10 ms ("),
        (35, 35, 8, 4, "4 workers: a micro-batch is fetched in 35 ms by one worker; enough"),
        (
            350,
            350,
            8,
            7,
            "7 workers: a micro-batch is fetched in 350 ms by one worker; as many as the 8 cores of this rank allow",
        ),
        (350, 350, 64, 16, "16 workers"),
        (350, 350, 1, 0, "the 1 core of this rank is for the rank itself"),
        (350, 20, 1, 1, "most of it waiting; as many as the 1 core of this rank allow"),
        (350, 20, 4, 4, "4 workers: a micro-batch is fetched in 350 ms by one worker, most of it waiting"),
    ],
)
def test_the_number_and_its_reason(clock_ms: float, processor_ms: float, cores: int, workers: int, reason: str) -> None:
    found = decided(clock_ms / 1000, processor_ms / 1000, cores)
    assert found.workers == workers
    assert workers <= cores
    assert reason in found.reason


class Slow:
    """Sixteen samples, each of which takes its time."""

    def __init__(self, seconds: float, log: Path | None = None) -> None:
        self.seconds = seconds
        self.log = log
        self.asked_in: int | None = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked_in = os.getpid()
        time.sleep(self.seconds)
        if self.log is not None:
            with self.log.open("a") as stream:
                stream.write(f"{index}\n")
        return {"x": torch.tensor(index)}


def chosen(data: Any, cores: int, step: int = 0, micro_batch: int = 4) -> Any:
    slices = Slices(micro_batch, micro_batch, 1, 0, 400)
    loader = Loader(Indexed(data), slices, torch.device("cpu"), torch.float32, seed=1)
    return loader.choose_workers(step, cores), loader


def test_a_dataset_that_waits_gets_workers_and_is_not_opened_in_the_rank() -> None:
    data = Slow(0.01)
    found, loader = chosen(data, cores=2)
    assert found.workers == loader.workers == 2
    assert "most of it waiting" in found.reason
    assert data.asked_in is None


def test_a_dataset_that_is_quick_gets_none() -> None:
    assert chosen([{"x": torch.tensor(1)}] * 16, cores=8, micro_batch=1)[0].workers == 0


def test_measuring_stops_in_time_with_a_dataset_that_is_very_slow(tmp_path: Path) -> None:
    found, _ = chosen(Slow(0.15, tmp_path / "asked"), cores=64)
    assert found.workers == 16
    fetched = len((tmp_path / "asked").read_text().split()) / 4
    assert fetched == 2 < 1 + MEASURED, "a second is over after two micro-batches of 0.6 s"


def test_at_the_end_of_a_stream_there_is_nothing_to_measure() -> None:
    assert chosen(Slow(1), cores=4, step=100)[0].workers == 0


def test_a_dataset_that_kills_its_process_is_told_while_it_is_measured() -> None:
    class Dying(Slow):
        def __getitem__(self, index: int) -> Any:
            os._exit(3)

    with pytest.raises(WorkerFailed, match="exit code 3"):
        chosen(Dying(0), cores=4)


@pytest.mark.parametrize("workers", [0, 3, "auto"])
def test_a_plan_may_say_auto(workers: Any) -> None:
    assert Plan(workers=workers).workers == workers


@pytest.mark.parametrize("workers", [-1, "many", 1.5])
def test_a_plan_may_say_nothing_else(workers: Any) -> None:
    with pytest.raises(ValueError, match="workers"):
        Plan(workers=workers)


def test_a_run_says_what_it_chose_and_why(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "auto")
    trained(alone(torch.device("cpu")), str(run.path), line_recipe(steps=2, plan={"workers": "auto"}))
    (said,) = [event for event in read_events(run) if event["event"] == "workers"]
    assert 0 <= said["workers"] <= cores_of_rank(1), "on a busy machine, quick fetching may look slow"
    assert f"{said['workers'] or 'no'} worker" in said["message"]
    assert "a micro-batch is fetched in " in said["message"]


def test_a_timeout_is_a_duration() -> None:
    recipe = line_recipe()
    with pytest.raises(InputError, match=r"data\.timeout.*90s, 12m or 1h30m"):
        line_recipe(data={"use": recipe.data.use, "timeout": "soon"})
