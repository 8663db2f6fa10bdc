"""One thread on a node writes down what its devices are at, and nothing that fails in it disturbs the run."""

from __future__ import annotations

import os
import time

import pytest
from hardware_driver import Driver
from user_runs import line_recipe

from gradus.launcher.device_sampler import DeviceSampler, gpus_of_job, gpus_used_by, with_descendants
from gradus.record.device_log import energy_of, read_device_samples


def wait_for(run, samples: int) -> None:
    until = time.monotonic() + 30
    while len(read_device_samples(run)) < samples and time.monotonic() < until:
        time.sleep(0.01)


def test_there_is_a_sample_at_once_and_one_at_the_end(run):
    with DeviceSampler(run, 3, 1, lambda: [os.getpid()], every_seconds=1000.0):
        wait_for(run, 1)
    first, last = read_device_samples(run)
    assert first.attempt == last.attempt == 3
    assert last.time > first.time
    assert first.host.ranks_cpu_seconds is not None
    assert first.gpus is None or first.gpus


def test_a_driver_with_a_counter_gives_energy(run):
    joules = iter(range(10_000, 10_000_000, 1000))  # thousandths
    driver = Driver(nvmlDeviceGetTotalEnergyConsumption=lambda device: next(joules), nvmlDeviceGetCount=1)
    with DeviceSampler(run, 1, 1, list, every_seconds=0.01, nvml=driver):
        wait_for(run, 5)
    samples = read_device_samples(run)
    assert energy_of(samples).joules == pytest.approx(len(samples) - 1)


def test_a_driver_that_falls_over_is_told_of_once_and_ends_nothing(run):
    class Broken(Driver):
        def __getattr__(self, name):
            if name == "nvmlDeviceGetPowerUsage":
                raise ZeroDivisionError("a bug in the binding")
            return super().__getattr__(name)

    problems: list[str] = []
    with DeviceSampler(run, 1, 1, list, every_seconds=0.01, nvml=Broken(), on_problem=problems.append):
        time.sleep(0.05)
    assert problems == ["devices are no longer written down: ZeroDivisionError: a bug in the binding"]


def test_beside_another_only_gpus_are_written_down_in_a_file_of_its_own(run):
    with DeviceSampler(run, 1, 1, lambda: [os.getpid()], beside=2, every_seconds=1000.0):
        wait_for(run, 1)
    [path] = (run.path / "devices").iterdir()
    assert path.stem.endswith("-2")
    assert read_device_samples(run)[0].host.cores is None


def test_gpus_that_somebody_has_chosen_all_belong_to_the_job(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"):
        monkeypatch.delenv(name, raising=False)
    assert gpus_of_job(2) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert gpus_of_job(2) is None


def test_ranks_may_share_a_gpu():
    recipe = line_recipe(plan={"ranks_per_gpu": 2})
    assert [gpus_used_by(ranks, recipe) for ranks in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert gpus_used_by(3, None) == 3


def test_a_process_is_among_its_descendants_own():
    assert with_descendants(os.getpid())[0] == os.getpid()
