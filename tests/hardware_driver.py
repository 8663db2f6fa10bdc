"""A driver of two GPUs that stands in for pynvml: no GPU is here, and none counts what a test can know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Error(Exception):
    pass


class Driver:
    """As much of pynvml as is asked, with two GPUs. `answers` replaces what a function says; an exception is raised."""

    NVMLError = NVMLError_LibraryNotFound = NVMLError_DriverNotLoaded = Error
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1

    def __init__(self, **answers: Any) -> None:
        self.opened = 0
        self.answers = {
            "nvmlSystemGetCudaDriverVersion_v2": 13000,
            "nvmlSystemGetDriverVersion": b"580.1",
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid[-1]),
            "nvmlDeviceGetIndex": lambda device: device,
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetName": b"NVIDIA H200",
            "nvmlDeviceGetUUID": lambda device: f"GPU-{device}",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 * 2**30, total=141 * 2**30),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87, memory=40),
            "nvmlDeviceGetPowerUsage": 512_345,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x1,  # idle
            "nvmlDeviceGetTotalEnergyConsumption": 12_345_678,
            "nvmlDeviceGetComputeRunningProcesses": ["one"],
        } | answers

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            value = self.answers[name]
            if isinstance(value, Exception):
                raise value
            return value(*arguments) if callable(value) else value

        return answer
