"""Framework: how software holds what a plan makes it hold: training here, and what published tables speak of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """How software holds what a plan makes it hold. The defaults are what training here does."""

    narrow_parameters: bool = False  # in 16 bit, beside a master copy; otherwise autocast makes copies as it goes
    gradient_buffers: bool = False  # in the wide format, from the start
    keeps_gathered: bool = True  # with the sequence divided, backward finds what divided layers gathered in forward
    # Pipelines are torch's: a stage has a buffer for what each micro-batch of a step brings, and schedules for several
    # stages on a rank hold on to all that they sent until the step is over (torch/distributed/pipelining/schedules.py).
    torch_pipelines: bool = True
    fused_norms: bool = False  # what norms keep for backward is as narrow as what they read


HERE = Framework()
# Megatron-LM: 16-bit parameters, fp32 master and gradients; the slice is kept and gathered again for backward
# (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
MEGATRON = Framework(
    narrow_parameters=True, gradient_buffers=True, keeps_gathered=False, torch_pipelines=False, fused_norms=True
)
