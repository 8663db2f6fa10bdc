"""Saved state: what a checkpoint holds of a model, and the share of it that one rank copies and writes. No torch."""

from __future__ import annotations

from gradus.planner.memory.model_state import ModelSize
from gradus.planner.zero import number_bytes
from gradus.schema.plan import Plan


def checkpoint_bytes(size: ModelSize, plan: Plan, *, averaged: bool = False, adapters: bool = False) -> int:
    """Parameters as the optimizer keeps them, and its state. No 16-bit copies, no gradients.

    `averaged`: a moving average of the trained ones is kept beside them. With `adapters`, what is not trained is left
    out, because the recipe builds it again.
    """
    _, wide = number_bytes(plan.precision)
    held = size.trained if adapters else size.parameters
    return round(wide * (held + (size.optimizer_tensors + averaged) * size.trained))


def share_bytes(size: ModelSize, plan: Plan, *, averaged: bool = False, adapters: bool = False) -> int:
    """What one rank saves of `size`, which it would hold without sharding: ranks that hold the same divide it evenly.

    Whether shards or copies: the ranks over which data is divided have all of it once.
    """
    holders = plan.mesh.replicate * plan.mesh.shards
    return -(-checkpoint_bytes(size, plan, averaged=averaged, adapters=adapters) // holders)
