"""The device of a rank."""

from __future__ import annotations

import torch

from gradus.hardware.detect import detect_machine
from gradus.hardware.torch_build import TorchBuild, check_torch_can_use
from gradus.schema.errors import InputError


def rank_device(local_rank: int) -> torch.device:
    """The GPU of this rank; the CPU only where there is none, never because torch cannot use one."""
    machine = detect_machine()
    architectures = tuple(torch.cuda.get_arch_list()) or None
    build = TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip, architectures)
    check_torch_can_use(machine, build)
    if not machine.gpus:
        return torch.device("cpu")
    if local_rank >= len(machine.gpus):
        raise InputError(f"--nproc: rank {local_rank} has no GPU; this node has {len(machine.gpus)}", field="--nproc")
    device = torch.device("cuda", local_rank)
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        raise InputError(
            f"{machine.gpus[local_rank].name} is there, but torch {torch.__version__} cannot use it: {error}",
            hint="see what nvidia-smi says; the driver may be older than torch needs",
        ) from error
    return device
