"""Model state: bytes of parameters, gradients and optimizer state on a rank. No torch.

`expected_state` says what training here holds at most in the middle of a step. It differs from the published formulas
of ZeRO (see zero.py) in what the implementation does: without sharding, parameters stay in fp32 whatever is computed
with; with it, gathered parameters are beside the rank's own rows of them; and gradients are reduced block by block.
`resting_state` is what of it is there at any time, or stays once it was made.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradus.planner.zero import number_bytes
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


def whole_gradients(plan: Plan) -> bool:
    """Whether gradients of sharded parameters are added up as a whole before they are divided.

    A pipeline reduces them once, after its last micro-batch.
    """
    return (plan.zero <= 1 or plan.mesh.pipeline > 1) and plan.accumulate > 1


def resting_state(size: ModelSize, plan: Plan) -> ModelState:
    """What a rank holds without gathering anything, with even shares; gradients as the optimizer finds them."""
    narrow, wide = number_bytes(plan.precision)
    moments = round(size.optimizer_tensors * wide * size.trained)
    if not plan.sharded:
        return ModelState(parameters=wide * size.parameters, gradients=wide * size.trained, optimizer=moments)
    if plan.offload == "cpu":  # the rows, and what the optimizer has for them
        return ModelState()
    ranks = plan.mesh.shards if plan.zero else 1
    rows = wide * size.parameters // ranks
    return ModelState(
        parameters=rows if narrow == wide else 0,
        master=rows if narrow < wide else 0,
        gradients=wide * size.trained // ranks,
        optimizer=moments // ranks,
    )


def expected_state(size: ModelSize, plan: Plan) -> ModelState:
    """What a rank holds at most of each kind, with even shares. They are reached at different moments of a step."""
    resting = resting_state(size, plan)
    if not plan.sharded:
        return resting
    # With zero 3, one block is computed while the next is gathered. Stages of a pipeline let go of nothing in between.
    by_block = plan.zero == 3 and plan.mesh.pipeline == 1
    gathered = min(size.parameters, size.outside_blocks + 2 * size.largest_block) if by_block else size.parameters
    narrow, wide = number_bytes(plan.precision)
    return ModelState(
        parameters=resting.parameters + narrow * gathered,
        master=resting.master,
        gradients=wide * size.trained if whole_gradients(plan) else resting.gradients,
        optimizer=resting.optimizer,
    )
