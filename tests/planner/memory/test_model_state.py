"""What a rank is expected to hold, and that it is what is published where both speak of the same."""

from __future__ import annotations

import pytest

from gradus.planner.memory.model_state import ModelSize, expected_state
from gradus.planner.zero import zero_bytes
from gradus.schema.plan import Mesh, Plan

P = 1200
SIZE = ModelSize(parameters=P, trained=P, outside_blocks=200, largest_block=100)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_with_bf16_and_accumulation_it_is_the_published_sum(zero: int, ranks: int) -> None:
    """Gradients are added up in fp32 here."""
    plan = Plan(mesh=Mesh(shard=ranks), zero=zero, precision="bf16", accumulate=2)
    published = zero_bytes(P, zero, ranks, low=2, high=4, gradient=4)
    assert expected_state(SIZE, plan).total == published.total


def test_without_sharding_parameters_stay_in_fp32() -> None:
    for precision in ("fp32", "bf16"):
        found = expected_state(SIZE, Plan(precision=precision))  # type: ignore[arg-type]
        assert (found.parameters, found.master, found.gradients, found.optimizer) == (4 * P, 0, 4 * P, 8 * P)


def test_in_fp32_gathered_parameters_are_beside_the_ranks_own_rows() -> None:
    found = expected_state(SIZE, Plan(mesh=Mesh(shard=4), zero=2))
    assert (found.parameters, found.master) == (4 * P + P, 0)


def test_zero_3_gathers_two_blocks_at_a_time() -> None:
    found = expected_state(SIZE, Plan(mesh=Mesh(shard=4), zero=3, precision="bf16"))
    assert found.parameters == 2 * (200 + 2 * 100)


def test_gradients_are_whole_only_while_zero_1_accumulates() -> None:
    def gradients(**changes: int) -> int:
        return expected_state(SIZE, Plan(mesh=Mesh(shard=4), **changes)).gradients  # type: ignore[arg-type]

    assert gradients(zero=1, accumulate=2) == 4 * P
    assert gradients(zero=1) == gradients(zero=2, accumulate=2) == P


def test_what_is_offloaded_is_not_on_the_device() -> None:
    found = expected_state(SIZE, Plan(mesh=Mesh(shard=2), zero=3, precision="bf16", offload="cpu"))
    assert found.total == found.parameters == 2 * (200 + 2 * 100)


def test_momentum_is_half_of_adam() -> None:
    size = ModelSize(parameters=P, trained=P, optimizer_tensors=1)
    assert expected_state(size, Plan()).optimizer == 4 * P


def test_stages_of_a_pipeline_let_go_of_no_gathered_parameters() -> None:
    plan = Plan(mesh=Mesh(shard=4, pipeline=2), zero=3, precision="bf16", accumulate=4)
    assert expected_state(SIZE, plan).parameters == 2 * P
