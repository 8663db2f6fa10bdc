"""GPU counters: how busy, how hot and how hungry the GPUs of this job are right now, as the driver says."""

from __future__ import annotations

import contextlib
from typing import Any

from gradus.hardware.detect import DetectedGpu, detect_machine
from gradus.hardware.gpu_health import BRAKES
from gradus.schema.device_sample import GpuSample

# Why a clock is lower than it could be: the brakes, and what is ordinary but costs speed. Idle is no such reason.
_REASONS = {0x0000000000000004: "power cap", 0x0000000000000010: "sync boost", **BRAKES}


class GpuCounters:
    """The driver, asked again and again. `close` when done."""

    def __init__(self, nvml: Any, devices: list[tuple[DetectedGpu, Any]]) -> None:
        self._nvml, self._devices = nvml, devices

    @classmethod
    def open(cls, at_most: int | None = None, nvml: Any = None) -> GpuCounters | None:
        """Of the GPUs that CUDA_VISIBLE_DEVICES leaves, `at_most` the first few; None without an NVIDIA driver.

        `nvml` stands in for the pynvml module.
        """
        if nvml is None:
            try:
                import pynvml
            except ImportError:
                return None
            nvml = pynvml
        machine = detect_machine(nvml)
        if machine.driver_version is None and not machine.gpus:
            return None
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return None
        devices = []
        for gpu in machine.gpus[:at_most]:
            with contextlib.suppress(nvml.NVMLError):
                devices.append((gpu, _handle(nvml, gpu)))
        return cls(nvml, devices)

    def read(self) -> tuple[GpuSample, ...]:
        return tuple(self._sample(gpu, device) for gpu, device in self._devices)

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _sample(self, gpu: DetectedGpu, device: Any) -> GpuSample:
        nvml = self._nvml

        def ask(function: str, *constants: str) -> Any:
            """What the driver says; None for a GPU, a driver or a binding that does not know the question."""
            try:
                return getattr(nvml, function)(device, *(getattr(nvml, name) for name in constants))
            except (nvml.NVMLError, AttributeError):
                return None

        rates, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        processes = ask("nvmlDeviceGetComputeRunningProcesses")
        return GpuSample(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            utilisation=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            power_watts=_thousandth(ask("nvmlDeviceGetPowerUsage")),
            power_limit_watts=_thousandth(ask("nvmlDeviceGetEnforcedPowerLimit")),
            temperature_celsius=ask("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
            clock_mhz=ask("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
            clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
            throttle=None if reasons is None else tuple(name for bit, name in _REASONS.items() if reasons & bit),
            energy_joules=_thousandth(ask("nvmlDeviceGetTotalEnergyConsumption")),
            processes=None if processes is None else len(processes),
        )


def _handle(nvml: Any, gpu: DetectedGpu) -> Any:
    """By its UUID, which a part of a GPU has as well."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    except (nvml.NVMLError, AttributeError, TypeError):  # old bindings want bytes
        return nvml.nvmlDeviceGetHandleByIndex(gpu.index)


def _thousandth(value: int | None) -> float | None:
    """The driver counts in thousandths: of a watt, of a joule."""
    return None if value is None else value / 1000
