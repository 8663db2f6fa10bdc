"""One pass: whether the optimizer updates narrow weights in one pass over gradients of 16 bits. No torch.

On CUDA, AdamW then reads each gradient as narrow as backward made it, scales it by clipping on the way and writes
weights in both widths (training/one_pass_adamw.py). Elsewhere gradients are widened first, and weights rounded later.
"""

from __future__ import annotations

from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe


def offers_one_pass(recipe: Recipe) -> bool:
    """Whether the recipe's optimizer can, on a GPU: not if it may have to leave a step out."""
    return recipe.optimizer.use == "adamw" and recipe.on_nan != "skip"


def in_one_pass(plan: Plan, *, offered: bool) -> bool:
    """Whether it does under this plan: sums over micro-batches are wide, and fp16 may leave a step out."""
    return offered and plan.narrow_weights and plan.accumulate == 1 and plan.precision != "fp16"
