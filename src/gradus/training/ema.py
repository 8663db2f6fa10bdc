"""EMA: a moving average of the weights, which often evaluates better than the weights themselves. A built-in hook.

`hooks: [{use: ema, decay: 0.999}]` keeps the average in every checkpoint (`hooks.ema.<parameter>`) and evaluates it
beside the weights (`validation_ema_loss`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradus.checkpoint.state import put
from gradus.checkpoint.tensor_file import StoredTensor
from gradus.parallel.part import local_part
from gradus.schema.errors import InputError, unknown_name
from gradus.training.hooks import Hook, HookRun


class Ema(Hook):
    every_rank = True  # each has the average of what it has of the model

    def __init__(self, decay: Any = 0.999, **unknown: Any) -> None:
        for key in unknown:
            raise unknown_name("key of the hook ema:", key, ["decay"], field="hooks")
        if not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise InputError(
                f"hooks: ema has decay {decay!r}, allowed: a number from 0 to less than 1", field="hooks", found=decay
            )
        self._decay = float(decay)
        self._average: dict[str, Tensor] = {}
        self._saved: Mapping[str, StoredTensor] = {}

    def on_start(self, run: HookRun) -> None:
        self._average = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}
        for name, average in self._average.items():
            if name in self._saved:
                put(average, self._saved[name])
        self._saved = {}

    @torch.no_grad()
    def on_step(self, run: HookRun) -> None:
        parameters = dict(run.model.named_parameters())
        current = [local_part(parameters[name]).tensor for name in self._average]
        averages = [local_part(average).tensor for average in self._average.values()]
        torch._foreach_lerp_(averages, current, 1 - self._decay)

    def on_evaluate(self, run: HookRun, results: dict[str, float]) -> None:
        run.evaluate_with(self._average, "ema")

    def state(self) -> dict[str, Tensor]:
        return self._average

    def _restore_stored(self, state: Mapping[str, StoredTensor]) -> None:
        self._saved = state  # which parts of it belong here is known when the model is
