"""What a checkpoint holds, counted on paper, and that ranks share it out."""

from __future__ import annotations

import pytest

from gradus.planner.memory.model_state import ModelSize
from gradus.planner.memory.saved_state import checkpoint_bytes, share_bytes
from gradus.schema.plan import Mesh, Plan

SEVEN = ModelSize(parameters=7_000_000_000, trained=7_000_000_000)


def test_a_checkpoint_holds_parameters_and_optimizer_state():
    """Adam on a model of 7 billion parameters: 84 GB."""
    assert checkpoint_bytes(SEVEN, Plan(precision="bf16")) == 84e9
    assert checkpoint_bytes(SEVEN, Plan(precision="fp64")) == 168e9
    frozen = ModelSize(parameters=7_000_000_000, trained=10_000_000)
    assert checkpoint_bytes(frozen, Plan(precision="bf16")) == 28e9 + 80e6
    assert checkpoint_bytes(frozen, Plan(precision="bf16"), adapters=True) == 120e6, "the base is built again"
    assert checkpoint_bytes(SEVEN, Plan(precision="bf16"), averaged=True) == 112e9


@pytest.mark.parametrize(
    "plan",
    [
        Plan(mesh=Mesh(replicate=8)),
        Plan(mesh=Mesh(shard=8), zero=3),
        Plan(mesh=Mesh(replicate=2, shard=4), zero=1),
        Plan(mesh=Mesh(shard=4, context=2), zero=2),
    ],
)
def test_ranks_save_as_much_each_whether_they_hold_copies_or_shards(plan):
    assert share_bytes(SEVEN, plan) == 84e9 / 8


def test_a_rank_of_a_tensor_group_or_a_stage_saves_its_own():
    half = ModelSize(parameters=3_500_000_000, trained=3_500_000_000)
    assert share_bytes(half, Plan(mesh=Mesh(tensor=2))) == share_bytes(half, Plan(mesh=Mesh(pipeline=2))) == 42e9
    assert share_bytes(half, Plan(mesh=Mesh(tensor=2, replicate=4))) == 42e9 / 4
