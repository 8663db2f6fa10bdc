"""GPU counters, read from a driver that stands in: no GPU is here, and none counts what a test can know."""

from __future__ import annotations

from typing import Any

import pytest
from hardware_driver import Driver, Error

from gradus.hardware.gpu_counters import GpuCounters


@pytest.fixture(autouse=True)
def every_gpu_is_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def read(**answers: Any) -> Any:
    driver = Driver(**answers)
    counters = GpuCounters.open(nvml=driver)
    assert counters is not None
    found = counters.read()
    counters.close()
    assert driver.opened == 0, "what was opened is closed"
    return found


def test_units_are_those_of_the_names():
    gpu = read()[0]
    assert (gpu.utilisation, gpu.power_watts, gpu.power_limit_watts) == (0.87, 512.345, 700.0)
    assert gpu.energy_joules == 12_345.678
    assert (gpu.memory_used_bytes, gpu.temperature_celsius) == (3 * 2**30, 61)
    assert (gpu.clock_mhz, gpu.clock_max_mhz, gpu.processes) == (1755, 1980, 1)
    assert gpu.throttle == (), "to be idle is no reason"


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_joules"),
        ("nvmlDeviceGetPowerUsage", "power_watts"),
        ("nvmlDeviceGetUtilizationRates", "utilisation"),
        ("nvmlDeviceGetComputeRunningProcesses", "processes"),
        ("nvmlDeviceGetClockInfo", "clock_mhz"),
    ],
)
def test_what_the_driver_does_not_say_is_none_and_the_rest_is_there(function, field):
    gpu = read(**{function: Error("not supported")})[0]
    assert getattr(gpu, field) is None
    assert gpu.temperature_celsius == 61


def test_throttling_is_named_by_old_drivers_too():
    reasons = {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x44}
    gpu = read(nvmlDeviceGetCurrentClocksEventReasons=Error("not found"), **reasons)[0]
    assert set(gpu.throttle) == {"power cap", "hardware thermal slowdown"}


@pytest.mark.parametrize(("visible", "found"), [("1", [1]), ("GPU-1,GPU-0", [1, 0]), ("", None), ("0,7", [0])])
def test_only_the_gpus_of_the_job_are_read(monkeypatch, visible, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    counters = GpuCounters.open(nvml=Driver())
    indices = None if counters is None else [gpu.index for gpu in counters.read()]
    assert indices == found


def test_of_gpus_that_nobody_has_chosen_only_those_of_the_ranks_are_read():
    counters = GpuCounters.open(1, Driver())
    assert counters is not None
    assert [gpu.index for gpu in counters.read()] == [0]


def test_without_a_driver_there_are_none():
    class NoDriver(Driver):
        def nvmlInit(self) -> None:
            raise Error("no driver")

    assert GpuCounters.open(nvml=NoDriver()) is None
