"""Model state: bytes of parameters, gradients and optimizer state on a rank. No torch.

`expected_state` says what training here holds at most in the middle of a step. It differs from the published formulas
of ZeRO (see zero.py) in what the implementation does: without sharding, parameters stay in fp32 whatever is computed
with; with it, gathered parameters are beside the rank's own rows of them; and gradients are reduced block by block.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradus.schema.plan import Plan


@dataclass(frozen=True)
class ModelState:
    """Bytes by kind, on one rank."""

    parameters: int = 0  # in the format that is computed with, gathered ones included
    master: int = 0  # the copy that the optimizer updates, where that is another one: shards under bf16 or fp16
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.master + self.gradients + self.optimizer


@dataclass(frozen=True)
class ModelSize:
    """Numbers of elements, of what one rank would hold without sharding."""

    parameters: int
    trained: int
    outside_blocks: int = 0  # parameters that are no part of a repeated block
    largest_block: int = 0
    optimizer_tensors: float = 2  # elements of optimizer state for each trained one: 2 of Adam, 1 of momentum


def expected_state(size: ModelSize, plan: Plan) -> ModelState:
    """What a rank holds at most of each kind, with even shares. They are reached at different moments of a step."""
    wide = 8 if plan.precision == "fp64" else 4
    narrow = 2 if plan.precision in ("bf16", "fp16", "fp8") else wide
    ranks = plan.mesh.shards if plan.zero else 1
    moments = round(size.optimizer_tensors * wide * size.trained)
    if not plan.sharded:
        return ModelState(parameters=wide * size.parameters, gradients=wide * size.trained, optimizer=moments)
    # With zero 3, one block is computed while the next is gathered.
    gathered = size.parameters if plan.zero < 3 else min(size.parameters, size.outside_blocks + 2 * size.largest_block)
    rows = wide * size.parameters // ranks
    # A pipeline reduces gradients once, after its last micro-batch.
    whole_gradients = (plan.zero <= 1 or plan.mesh.pipeline > 1) and plan.accumulate > 1
    on_host = plan.offload == "cpu"  # the rows, and what the optimizer has for them
    return ModelState(
        parameters=narrow * gathered + (rows if narrow == wide and not on_host else 0),
        master=rows if narrow < wide and not on_host else 0,
        gradients=wide * size.trained if whole_gradients else 0 if on_host else wide * size.trained // ranks,
        optimizer=0 if on_host else moments // ranks,
    )
