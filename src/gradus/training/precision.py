"""Precision: what is computed in which number format, and what a device can do.

Parameters are kept in fp32 (fp64 for tests); bf16 and fp16 are reached through autocast, which leaves norms and losses
in fp32. fp16 needs loss scaling, because its smallest number is 6e-8 and gradients are often smaller. fp8 is bf16 with
large Linear layers that multiply in 8 bits (see `float8`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from gradus.schema.errors import InputError
from gradus.schema.plan import Precision


@dataclass(frozen=True)
class Numbers:
    """The number formats of a run."""

    parameters: torch.dtype
    autocast: torch.dtype | None
    scales_loss: bool
    tf32: bool

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """Forward passes run inside this."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)


_NUMBERS = {
    "fp32": Numbers(torch.float32, None, scales_loss=False, tf32=False),
    "tf32": Numbers(torch.float32, None, scales_loss=False, tf32=True),
    "bf16": Numbers(torch.float32, torch.bfloat16, scales_loss=False, tf32=True),
    "fp16": Numbers(torch.float32, torch.float16, scales_loss=True, tf32=True),
    "fp8": Numbers(torch.float32, torch.bfloat16, scales_loss=False, tf32=True),
    "fp64": Numbers(torch.float64, None, scales_loss=False, tf32=False),
}


_LACKING_ON_CPU = {
    "tf32": ("fp32", "TF32 is a mode of NVIDIA tensor cores"),
    "fp8": ("bf16", "it has no FP8 matrix multiplication"),
}


def numbers_for(precision: Precision, device: torch.device) -> Numbers:
    """The formats of a precision, or a refusal that names the alternative where the device lacks them."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        lacking = _lacking_on_cuda(precision, capability)
        name = f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]})"
    else:
        lacking = _LACKING_ON_CPU.get(precision)
        name = "the CPU"
    if lacking:
        alternative, reason = lacking
        raise InputError(
            f"plan.precision: found {precision}, which {name} does not have: {reason}",
            hint=f"use plan.precision={alternative}",
            field="plan.precision",
            found=precision,
            allowed=alternative,
        )
    return _NUMBERS[precision]


def apply_backend_settings(numbers: Numbers, deterministic: bool) -> None:
    """The process-wide switches of torch that belong to a precision and to deterministic mode."""
    torch.backends.cuda.matmul.allow_tf32 = numbers.tf32
    torch.backends.cudnn.allow_tf32 = numbers.tf32
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic)


def _lacking_on_cuda(precision: Precision, capability: tuple[int, int]) -> tuple[str, str] | None:
    if precision in ("bf16", "tf32") and capability < (8, 0):
        return "fp16" if precision == "bf16" else "fp32", f"{precision} needs compute capability 8.0 or newer"
    if precision == "fp8" and capability < (8, 9):
        reason = "FP8 matrix multiplication needs compute capability 8.9 or newer"
        return "bf16" if capability >= (8, 0) else "fp16", reason
    return None
