"""Device memory: what a process takes of a GPU beside the tensors that a step makes. No torch.

These are constants of a generation of hardware and of libraries, not of a model. All are for torch 2.11 and newer with
CUDA 12 and newer.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradus.schema.plan import Plan

MIB = 2**20

# The driver's own, with the kernels that a training step loads. Hopper and newer: 837 to 877 MiB, 867 in the median of
# 27 training runs on an H200 with torch 2.11 and CUDA 13 (benchmarks/measured/h200.json, outside_allocator_bytes:
# what of the device is neither free nor held by torch's allocator). Before any kernel is loaded, 616 MiB
# on a node of eight data-centre GPUs (LMCache/LMCache issue 4019) and 426 MiB on an RTX 6000 Ada (unslothai/unsloth-zoo
# pull request 1053): of older generations, the latter and the same 250 MiB of kernels are assumed.
CONTEXT_BYTES_FROM_HOPPER = 867 * MIB
CONTEXT_BYTES = (426 + 250) * MIB
HOPPER = (9, 0)

# What torch reserves for cuBLAS, for each thread that multiplies: forward has one, backward another
# (aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: 32 MiB on Hopper, :4096:2:16:8 elsewhere), and
# 1 MiB of cuBLASLt's; 64 to 66 MiB were measured in the same runs.
WORKSPACE_BYTES = 2 * (4096 * 1024 * 2 + 16 * 1024 * 8) + MIB
WORKSPACE_BYTES_FROM_HOPPER = 2 * 32 * MIB + MIB

# NCCL: a ring has two connections however many ranks there are, and each channel has buffers of its own, 10 MiB for a
# connection (NVIDIA/nccl issues 986 and 1685, where NCCL_DEBUG_SUBSYS=ALLOC shows them); 24 channels are assumed, with
# what is received buffered here. All-to-all connects every pair: 3.28 GB for the seven others of a node (issue 1685).
COMMUNICATOR_BYTES = 24 * 10 * MIB
ALL_TO_ALL_BYTES = 470 * 10**6  # for each other rank, up to a node's

# Of what comes and goes, the share that the allocator holds in pieces that nobody can use. Runs have expandable
# segments (expandable_segments:True, which the launcher sets): memory is cut to 512 bytes and mapped in pages of 2 MiB,
# which the allocator gives back before it fails. On an H200, two models ran with them in 1.04 times the tensors that
# they had at the peak (benchmarks/plan_accuracy.md, near a memory limit); without, one of the two ran out of memory at
# 1.15 times. The share is an assumption between none and 4 %.
FRAGMENTATION = 0.02


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that a process takes in any case."""

    context_bytes: int = CONTEXT_BYTES
    workspace_bytes: int = WORKSPACE_BYTES  # in torch's own memory, beside the tensors of the model
    fragmentation: float = FRAGMENTATION
    uses_nccl: bool = True


NO_GPU = DeviceMemory(0, 0, 0.0, uses_nccl=False)  # ranks on CPUs talk by gloo, which keeps no such buffers


def device_memory(capability: tuple[int, int] | None) -> DeviceMemory:
    """Of a GPU with this compute capability; of another kind of GPU, or one that is not known, the newest counts."""
    if capability is not None and capability < HOPPER:
        return DeviceMemory()
    return DeviceMemory(CONTEXT_BYTES_FROM_HOPPER, WORKSPACE_BYTES_FROM_HOPPER)


def library_bytes(plan: Plan) -> int:
    """Buffers of NCCL for the groups of a plan. Ranks that share a GPU talk through the host instead."""
    mesh = plan.mesh
    if mesh.world_size == 1 or plan.ranks_per_gpu > 1:
        return 0
    divided = [name for name in ("replicate", "pipeline", "shard", "context", "tensor") if getattr(mesh, name) > 1]
    groups = len(divided) + (len(divided) > 1)  # and the group of all
    others = min(mesh.expert, 8) - 1
    return groups * COMMUNICATOR_BYTES + others * ALL_TO_ALL_BYTES
