"""Evaluation: loss and metrics over the validation data, the same on any number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from gradus.data.loader import Loader
from gradus.faults.stop_request import StopRequest
from gradus.parallel.world import World
from gradus.schema.errors import unknown_name
from gradus.schema.recipe import EvaluateBlock
from gradus.training.objective import Objective
from gradus.training.precision import Numbers


@torch.no_grad()
def evaluate(
    model: nn.Module,
    objective: Objective,
    loader: Loader,
    batches: int,
    numbers: Numbers,
    world: World,
    stop: StopRequest,
) -> dict[str, float] | None:
    """Means over the validation samples, or None when a stop request came in between.

    The training stream is not touched: order and randomness of a step depend on its number alone.
    """
    sums: dict[str, torch.Tensor] = {}
    interrupted = torch.zeros((), dtype=torch.float64, device=world.device)
    was_training = model.training
    model.eval()
    try:
        for micro in loader.micro_batches(0, batches):
            if stop.seen():
                interrupted += 1
                break
            with numbers.computing(world.device):
                losses = objective(model, micro.inputs, micro.samples)
            for name, pair in {"loss": (losses.loss_sum, losses.count), **losses.metrics}.items():
                values = torch.stack([pair[0].double(), pair[1].double()])
                sums[name] = sums[name] + values if name in sums else values
    finally:
        model.train(was_training)
    # Ranks may notice a stop request at different batches; they meet here, and one that noticed is enough.
    if world.sum_(interrupted).item():
        return None
    totals = world.sum_(torch.stack([sums[name] for name in sums])).tolist()
    return {name: total / count if count else float("nan") for name, (total, count) in zip(sums, totals, strict=True)}


@dataclass
class Progress:
    """How evaluations have gone so far: what `target`, `stop_after` and the best checkpoint need to know."""

    evaluated_step: int = 0
    best: float | None = None
    best_step: int | None = None
    since_best: int = 0
    reached: str | None = field(default=None)  # why training ends early

    def note(self, step: int, results: dict[str, float], block: EvaluateBlock) -> None:
        """Take in the results of one evaluation."""
        if block.metric not in results:
            raise unknown_name("metric", block.metric, results, field="evaluate.metric")
        value = results[block.metric]
        lower_is_better = block.metric == "loss"
        self.evaluated_step = step
        better = self.best is None or (value < self.best if lower_is_better else value > self.best)
        if better and not math.isnan(value):
            self.best, self.best_step, self.since_best = value, step, 0
        else:
            self.since_best += 1
        target = block.target
        if target is not None and (value <= target if lower_is_better else value >= target):
            self.reached = f"validation {block.metric} {value:.4g} reached the target {target:g} at step {step}"
        elif block.stop_after is not None and self.since_best >= block.stop_after:
            best = "been a number" if self.best is None else f"improved on {self.best:.4g} (step {self.best_step})"
            self.reached = f"validation {block.metric} has not {best} in {self.since_best} evaluations"
