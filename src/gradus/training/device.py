"""The device of a rank."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

from gradus.hardware.detect import detect_machine
from gradus.hardware.torch_build import TorchBuild, check_torch_can_use
from gradus.record.variables import GPU, OWN
from gradus.schema.errors import InputError


def rank_device(local_rank: int, ranks_per_gpu: int = 1) -> torch.device:
    """The GPU of this rank; the CPU only where there is none, never because torch cannot use one.

    With several ranks for each GPU, neighbours share one.
    """
    machine = detect_machine()
    architectures = tuple(torch.cuda.get_arch_list()) or None
    build = TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip, architectures)
    check_torch_can_use(machine, build)
    if not machine.gpus:
        return torch.device("cpu")
    alone = os.environ.get(GPU) == OWN
    number = 0 if alone else gpu_of(local_rank, len(machine.gpus), ranks_per_gpu)
    device = torch.device("cuda", number)
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        raise InputError(
            f"{machine.gpus[number].name} is there, but torch {torch.__version__} cannot use it: {error}",
            hint="see what nvidia-smi says; the driver may be older than torch needs",
        ) from error
    return device


def gpu_of(local_rank: int, gpus: int, ranks_per_gpu: int) -> int:
    """The number of a rank's GPU on its node."""
    number = local_rank // ranks_per_gpu
    if number >= gpus:
        shared = f" for {ranks_per_gpu} ranks each" if ranks_per_gpu > 1 else ""
        raise InputError(f"--nproc: rank {local_rank} has no GPU; this node has {gpus}{shared}", field="--nproc")
    return number


@cache
def has_triton() -> bool:
    """Which our own kernels are written in. Not every torch comes with it."""
    return find_spec("triton") is not None


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def limit_memory(device: torch.device, memory_limit_gib: float | None) -> None:
    """Let this process have so much of its GPU and no more, as if the GPU were smaller. A CPU has no such limit."""
    if memory_limit_gib is None or device.type != "cuda":
        return
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction_of(memory_limit_gib, whole), device)


def fraction_of(memory_limit_gib: float, whole_bytes: int) -> float:
    fraction = memory_limit_gib * 2**30 / whole_bytes
    if fraction > 1:
        raise InputError(
            f"plan.memory_limit_gib: found {memory_limit_gib:g}, but the GPU has {whole_bytes / 2**30:.1f}",
            hint="leave it out to use all of the GPU",
            field="plan.memory_limit_gib",
            found=memory_limit_gib,
            allowed=f"at most {whole_bytes / 2**30:.1f}",
        )
    return fraction
