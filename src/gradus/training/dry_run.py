"""Dry run: everything is built as for the real run, and one step is taken on a few samples."""

from __future__ import annotations

import os

from gradus.record.format import count_text
from gradus.record.variables import DRY_RUN
from gradus.schema.recipe import Recipe
from gradus.training.breakdown import peak_memory_bytes
from gradus.training.live_run import LiveRun

GIB = 1024**3


def is_dry_run() -> bool:
    return os.environ.get(DRY_RUN) == "1"


def shortened(recipe: Recipe) -> Recipe:
    """The same recipe for a single step and a single batch of evaluation, with the samples of that step only."""
    # Through a document, so that it is checked as any other recipe.
    document = {
        key: value
        for key, value in recipe.model_dump(exclude_unset=True).items()
        if key not in ("steps", "epochs", "tokens")
    }
    document["data"] = {**document["data"], "limit": min(recipe.data.limit or recipe.batch, recipe.batch)}
    document["evaluate"] = {**document.get("evaluate", {}), "batches": 1}
    return Recipe.from_document({**document, "steps": 1})


def summary(live: LiveRun) -> list[str]:
    """What was built, in lines for people."""
    total, trained = live.parameter_counts
    share = f", {trained:,} of them trained" if trained < total else ""
    evaluated = f"; validation loss {live.state.evaluation.last:.4g}" if live.state.evaluation.last is not None else ""
    loss = f"{live.last_loss:.4g}" if live.last_loss is not None else "unknown"
    return [
        f"model: {type(live.model).__name__}, {total:,} parameters{share}",
        f"plan: {live.plan.mesh}, micro-batch {live.plan.micro_batch}, accumulate {live.plan.accumulate}, "
        f"{live.plan.precision}",
        f"one step on {count_text(live.recipe.batch, 'sample')}: loss {loss}{evaluated}",
        f"peak memory of rank 0: {peak_memory_bytes(live.world.device) / GIB:.2f} GiB",
    ]
