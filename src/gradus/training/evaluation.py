"""Evaluation: loss and metrics over the validation data, the same on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradus.data.loader import Loader
from gradus.faults.stop_request import StopRequest
from gradus.parallel.world import World
from gradus.schema.errors import unknown_name
from gradus.schema.recipe import EvaluateBlock
from gradus.training.objective import Losses
from gradus.training.precision import Numbers

Measure = Callable[[nn.Module, Any, int], Losses]  # of a model, a batch and its number of real samples


@torch.no_grad()
def evaluate(
    model: nn.Module,
    objective: Measure,
    loader: Loader,
    batches: int,
    numbers: Numbers,
    world: World,
    stop: StopRequest,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, float] | None:
    """Means over the validation samples, or None when a stop request came in between.

    The training stream is not touched: order and randomness of a step depend on its number alone.
    """
    sums: dict[str, torch.Tensor] = {}
    interrupted = torch.zeros((), dtype=torch.float64, device=world.device)
    training = [module for module in model.modules() if module.training]  # some may be frozen in evaluation mode
    model.eval()
    try:
        for micro in loader.micro_batches(0, batches):
            on_batch()
            if _asked_to_stop(stop, world):
                interrupted += 1
                break
            with numbers.computing(world.device):
                losses = objective(model, micro.inputs, micro.samples)
            for name, pair in {"loss": (losses.loss_sum, losses.count), **losses.metrics}.items():
                values = torch.stack([pair[0].double(), pair[1].double()])
                sums[name] = sums[name] + values if name in sums else values
    finally:
        for module in training:
            module.training = True
    # Ranks may notice a stop request at different batches; they meet here, and one that noticed is enough.
    if world.sum_(interrupted).item():
        return None
    totals = world.sum_(torch.stack([sums[name] for name in sums])).tolist()
    return {name: total / count if count else float("nan") for name, (total, count) in zip(sums, totals, strict=True)}


def _asked_to_stop(stop: StopRequest, world: World) -> bool:
    """Ranks may learn of a request at different batches; those that need each other in forward leave together."""
    if world.size == world.mesh.replicate:
        return stop.seen()
    told = torch.tensor(int(stop.seen()))  # of the host, which gloo sends: nothing waits for the device
    return world.sum_(told).item() > 0


@dataclass
class Progress:
    """How evaluations have gone so far: what `target`, `stop_after` and the best checkpoint need to know."""

    metric: str = "loss"
    evaluated_step: int = 0
    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    since_best: int = 0

    def note(self, step: int, results: dict[str, float], block: EvaluateBlock) -> None:
        """Take in the results of one evaluation. If another metric counts now, what was best before does not."""
        if block.metric not in results:
            raise unknown_name("metric", block.metric, results, field="evaluate.metric")
        if block.metric != self.metric:
            self.metric, self.best, self.best_step, self.since_best = block.metric, None, None, 0
        self.evaluated_step, self.last = step, results[block.metric]
        if math.isfinite(self.last) and (self.best is None or block.is_better(self.last, self.best)):
            self.best, self.best_step, self.since_best = self.last, step, 0
        else:
            self.since_best += 1

    def reason_to_end(self, block: EvaluateBlock) -> str | None:
        """Why training is over by the present recipe, if it is."""
        if block.metric != self.metric or self.last is None:
            return None
        target = block.target
        if target is not None and (self.last == target or block.is_better(self.last, target)):
            return (
                f"validation {self.metric} {self.last:.4g} reached the target {target:g} at step {self.evaluated_step}"
            )
        if block.stop_after is not None and self.since_best >= block.stop_after:
            best = "been a number" if self.best is None else f"improved on {self.best:.4g} (step {self.best_step})"
            return f"validation {self.metric} has not {best} in {self.since_best} evaluations"
        return None
