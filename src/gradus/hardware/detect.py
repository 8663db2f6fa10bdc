"""What this machine gives this process: cores, memory and GPUs, without touching CUDA or torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gradus.hardware.cgroup import cpu_quota, memory_limit
from gradus.schema.cluster import GpuNumbers


@dataclass(frozen=True)
class DetectedGpu:
    """A GPU that this process may use. `index` counts all GPUs of the machine, as nvidia-smi does."""

    index: int
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    uuid: str

    @property
    def numbers(self) -> GpuNumbers:
        """In the terms of a cluster file."""
        return GpuNumbers(
            name=self.name,
            memory_gib=round(self.memory_bytes / 2**30, 2),
            compute_capability=list(self.compute_capability),
        )


@dataclass(frozen=True)
class Machine:
    """What there is to train on. `problems` names GPUs that are there but do not answer."""

    hostname: str
    cpu_cores: int
    memory_bytes: int
    gpus: tuple[DetectedGpu, ...] = ()
    driver_version: str | None = None
    driver_cuda: tuple[int, int] | None = None
    problems: tuple[str, ...] = ()


def detect_machine(nvml: Any = None) -> Machine:
    """Look at this machine. `nvml` stands in for the pynvml module."""
    return Machine(
        hostname=socket.gethostname(),
        cpu_cores=usable_cores(),
        memory_bytes=_usable_memory(),
        **_nvidia(nvml, os.environ.get("CUDA_VISIBLE_DEVICES")),
    )


def usable_cores() -> int:
    return within_quota(len(os.sched_getaffinity(0)))


def within_quota(cores: int) -> int:
    """Of so many cores, those that the job's share of processor time can keep busy."""
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _usable_memory() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return physical if limit is None else min(physical, limit)


def _nvidia(nvml: Any, visible: str | None) -> dict[str, Any]:
    """The GPU fields of a Machine. No library or no driver means no GPU; anything else that fails is a problem."""
    if visible is not None and visible.strip() in ("", "-1"):
        return {}
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return {}
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return {}
    except nvml.NVMLError as error:
        return {"problems": (f"the NVIDIA driver does not answer: {error}",)}
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus, problems = _all_gpus(nvml)
        return {
            "gpus": tuple(gpus if visible is None else _visible(nvml, gpus, visible)),
            "driver_version": _text(nvml.nvmlSystemGetDriverVersion()),
            "driver_cuda": (cuda // 1000, cuda % 1000 // 10),
            "problems": tuple(problems),
        }
    except nvml.NVMLError as error:
        return {"problems": (f"the NVIDIA driver does not answer: {error}",)}
    finally:
        nvml.nvmlShutdown()


def _all_gpus(nvml: Any) -> tuple[list[DetectedGpu], list[str]]:
    gpus, problems = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(_gpu(nvml, device, physical=device))
        except nvml.NVMLError as error:
            problems.append(f"GPU {index}: {error}")
    return gpus, problems


def _visible(nvml: Any, gpus: list[DetectedGpu], visible: str) -> Iterator[DetectedGpu]:
    """Those that CUDA_VISIBLE_DEVICES names, in its order. Like CUDA, stop at the first name that fits no GPU."""
    for name in (part.strip() for part in visible.split(",")):
        if name.startswith("MIG-"):
            part_of_gpu = nvml.nvmlDeviceGetHandleByUUID(name)
            yield _gpu(nvml, part_of_gpu, physical=nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part_of_gpu))
            continue
        named = [
            gpu for gpu in gpus if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
        ]
        if len(named) != 1:
            return
        yield named[0]


def _gpu(nvml: Any, device: Any, physical: Any) -> DetectedGpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(physical)
    return DetectedGpu(
        index=nvml.nvmlDeviceGetIndex(physical),
        name=_text(nvml.nvmlDeviceGetName(device)),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(device).total,
        compute_capability=(major, minor),
        uuid=_text(nvml.nvmlDeviceGetUUID(device)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes in releases of nvidia-ml-py before 11.515
