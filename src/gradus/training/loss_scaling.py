"""Loss scaling for fp16, decided on the device: nothing here makes the host wait.

The loss is multiplied by a scale so that small gradients survive fp16. A step whose gradients overflow is skipped and
halves the scale; 2,000 good steps in a row double it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INITIAL_SCALE = 65536.0
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000


class LossScale:
    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(INITIAL_SCALE, device=device)
        self.good_steps = torch.tensor(0, dtype=torch.int32, device=device)

    @torch.no_grad()
    def update(self, overflow: Tensor) -> None:
        """Shrink after an overflow (1.0), grow after enough steps without one (0.0)."""
        happened = overflow > 0
        good_steps = torch.where(happened, 0, self.good_steps + 1)
        grows = good_steps >= GROWTH_INTERVAL
        factor = torch.where(happened, BACKOFF, torch.where(grows, GROWTH, 1.0))
        scale = self.scale * factor
        self.scale.copy_(torch.where(torch.isfinite(scale), scale, self.scale))  # an infinite one would never recover
        self.good_steps.copy_(torch.where(grows, 0, good_steps))

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self.good_steps}


def step_unless(optimizer: torch.optim.Optimizer, overflow: Tensor) -> None:
    """An optimizer step that does not happen where `overflow` is 1.0.

    torch's fused optimizers, and ours, take the flag and decide on the device. For any other the host has to look,
    which waits for the device once a step.
    """
    amp: Any = optimizer
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        amp.grad_scale, amp.found_inf = None, overflow
        try:
            optimizer.step()
        finally:
            del amp.grad_scale, amp.found_inf
    elif overflow.item() == 0:
        optimizer.step()
