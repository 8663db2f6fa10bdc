"""Replicas start alike, stay alike, and say in the user's terms what they cannot train."""

from __future__ import annotations

import pytest
import torch
from pool import Pool
from replicate_cases import (
    PartlyUsed,
    WithBuffers,
    collectives_of_sharing,
    replicas_beside_stages,
    start_and_train,
    train_with_unused,
    unused_in_the_last_micro_batch,
)

from gradus.parallel.replicate import check_every_parameter_is_used, explain_ddp_error
from gradus.parallel.world import alone
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh


def test_replicas_start_with_rank_0s_tensors_train_alike_and_share_their_buffers(pool: Pool) -> None:
    ranks = pool.run(2, start_and_train)
    assert [rank["warnings"] for rank in ranks] == [[], []]
    wanted = WithBuffers(0)
    for rank in ranks:
        for name, value in [*wanted.named_parameters(), *wanted.named_buffers()]:
            assert torch.equal(rank["start"][name], value), f"{name} at the start"

    first, second = (rank["trained"] for rank in ranks)
    own = {name for name in first if not torch.equal(first[name], second[name])}
    assert own == {"average", "seen"}, "what forward takes from the rank's own samples, and nothing else"
    assert torch.equal(first["frozen.weight"], wanted.frozen.weight)
    assert not torch.equal(first["linear.weight"], wanted.linear.weight)

    for rank in ranks:
        for name, value in first.items():
            assert torch.equal(rank["shared"][name], value), f"{name} after sharing"


def test_a_model_whose_buffers_are_all_batch_statistics_sends_nothing(pool: Pool) -> None:
    assert pool.run(2, collectives_of_sharing) == [0, 0]


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        (Mesh(replicate=2, pipeline=2), [[0, 2], [1, 3]]),
        (Mesh(pipeline=2, context=2), [[0, 1], [2, 3]]),
        (Mesh(tensor=4), [[0], [1], [2], [3]]),
    ],
)
def test_only_ranks_that_hold_the_same_are_replicas(pool: Pool, mesh: Mesh, groups: list[list[int]]) -> None:
    """Parameters, buffers, gradients and batch statistics are shared inside a group, and with nobody else."""
    ranks = pool.run(4, replicas_beside_stages, mesh)
    for group in groups:
        inputs = torch.cat([ranks[rank]["x"] for rank in group])
        for rank in group:
            found = ranks[rank]
            assert torch.equal(found["start"]["linear.weight"], torch.full((2, 2), group[0] + 1.0))
            assert torch.equal(found["start"]["seen"], torch.full((1,), group[0] + 1.0))
            assert torch.equal(found["seen"], torch.full((1,), float(group[0])))
            assert found["mean"] == pytest.approx(0.1 * inputs.mean(0), rel=1e-6)
            of_weight = inputs.sum(0) / len(group)  # the sum of losses of each rank, averaged; bf16 holds it exactly
            assert torch.equal(found["linear.weight"], of_weight.expand(2, 2))


@pytest.mark.parametrize(("unused", "names"), [(1, "unused.0 (1 of"), (7, "unused.3, unused.4, ... (7 of")])
def test_unused_parameters_are_named_by_the_check_and_in_ddps_error(pool: Pool, unused: int, names: str) -> None:
    for rank in pool.run(2, train_with_unused, unused):
        for kind, message, hint in rank.values():
            assert kind == "InputError"
            assert names in message
            assert "used." not in message.replace("unused.", "")
            assert "requires_grad_(False)" in hint


def test_so_they_are_when_only_the_last_micro_batch_leaves_them_out(pool: Pool) -> None:
    for rank in pool.run(2, unused_in_the_last_micro_batch):
        kind, message, _ = rank["explained"]
        assert kind == "InputError"
        assert "unused.0, unused.1 (2 of" in message


def test_one_rank_refuses_them_too_unless_they_are_frozen() -> None:
    model = PartlyUsed(1)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(InputError, match=r"unused\.0 \(1 of") as caught:
        check_every_parameter_is_used(model)
    assert caught.value.details["found"] == ["unused.0"]
    model.unused.requires_grad_(False)
    check_every_parameter_is_used(model)


def test_other_errors_stay_as_they_are() -> None:
    error = RuntimeError("CUDA out of memory")
    assert explain_ddp_error(error, PartlyUsed(1)) is error


def test_samples_are_divided_among_data_ranks() -> None:
    world = alone(torch.device("cpu"))
    assert (world.data_rank, world.data_ranks) == (0, 1)
