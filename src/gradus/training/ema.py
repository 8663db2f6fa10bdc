"""EMA: a moving average of the weights, which often evaluates better than the weights themselves. A built-in hook.

`hooks: [{use: ema, decay: 0.999}]` keeps the average in every checkpoint (`hooks.ema.<parameter>`) and evaluates it
beside the weights (`validation_ema_loss`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradus.schema.errors import InputError, unknown_name
from gradus.training.hooks import Hook, HookRun


class Ema(Hook):
    every_rank = True  # with replicas each rank has the whole average; all are equal

    def __init__(self, decay: Any = 0.999, **unknown: Any) -> None:
        for key in unknown:
            raise unknown_name("key of the hook ema:", key, ["decay"], field="hooks")
        if not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise InputError(
                f"hooks: ema has decay {decay!r}, allowed: a number from 0 to less than 1", field="hooks", found=decay
            )
        self._decay = float(decay)
        self._average: dict[str, Tensor] = {}

    def on_start(self, run: HookRun) -> None:
        trained = {name: p.detach() for name, p in run.model.named_parameters() if p.requires_grad}
        # From a checkpoint the average comes to host memory.
        self._average = {
            name: self._average[name].to(p) if name in self._average else p.clone() for name, p in trained.items()
        }

    @torch.no_grad()
    def on_step(self, run: HookRun) -> None:
        parameters = dict(run.model.named_parameters())
        current = [parameters[name].detach() for name in self._average]
        torch._foreach_lerp_(list(self._average.values()), current, 1 - self._decay)

    def on_evaluate(self, run: HookRun, results: dict[str, float]) -> None:
        run.evaluate_with(self._average, "ema")

    def state(self) -> dict[str, Tensor]:
        return self._average

    def restore(self, state: dict[str, Tensor]) -> None:
        self._average = state
