"""Where the GPU's time of a step goes: its kernels by kind, and the longest of them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

LONGEST = 40  # kernels that are written down by name
MEMORY_BOUND = "memory-bound"
# The first kind of which a word is in a kernel's name; what has none of them moves numbers and hardly computes.
WORDS = {
    "attention": ("flash", "fmha", "sdpa", "cudnn_generated", "cudnn::fusion"),
    "convolutions": ("convol", "fprop", "dgrad", "wgrad"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "triton_tem", "matmul"),
    "optimizer": ("adam", "multi_tensor", "lpnorm", "_update", "_squares"),
    "copies": ("memcpy", "memset"),
}


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of a step. What is left of the step, the GPU did nothing."""

    by_kind: dict[str, float]
    longest: dict[str, float]


def kernel_times(run: Callable[[], object], steps: int) -> KernelTimes | None:
    """Of `run`, which does so many steps; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    seconds = {event.key: event.self_device_time_total / 1e6 / steps for event in recorded.key_averages()}
    by_kind: dict[str, float] = {}
    for name, of_kernel in seconds.items():
        by_kind[kind_of(name)] = by_kind.get(kind_of(name), 0.0) + of_kernel
    longest = sorted(seconds, key=lambda name: -seconds[name])[:LONGEST]
    return KernelTimes(by_kind, {name: seconds[name] for name in longest})


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, words in WORDS.items() if any(word in name for word in words)), MEMORY_BOUND)
