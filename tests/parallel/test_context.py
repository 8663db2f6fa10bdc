"""Attention over sequences that are divided among ranks is exact, and every rank has as much of it to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import user_code
from context_cases import MODELS, attend, recipe_for, refusal_of_ring, step
from pool import Pool
from torch import nn
from training_cases import trained

from gradus.models.settings import ViTSettings
from gradus.models.vit import ViT
from gradus.parallel.context import apply_context, positions_of, split_sequence, whole_of
from gradus.parallel.world import World
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan

CPU = torch.device("cpu")


def world_of(rank: int, ways: int) -> World:
    return World(rank, rank, ways, CPU, mesh=Mesh(context=ways))


@pytest.mark.parametrize("ways", [2, 3, 4, 8])
def test_every_rank_sees_as_many_keys_and_the_parts_make_up_the_sequence(ways: int) -> None:
    tokens = 6 * ways
    held = [positions_of(rank, ways, tokens // ways, CPU) for rank in range(ways)]
    assert torch.equal(whole_of(held, dim=0), torch.arange(tokens))
    seen = [(positions + 1).sum().item() for positions in held]  # each query sees the keys up to its own
    assert len(set(seen)) == 1, seen


@pytest.mark.parametrize("ways", [2, 4])
def test_the_order_is_the_one_that_torchs_ring_expects(ways: int) -> None:
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    order = _HeadTailLoadBalancer(4 * ways, ways, CPU)._generate_indices()[0]
    held = [positions_of(rank, ways, 4, CPU) for rank in range(ways)]
    assert torch.equal(torch.cat(held), order.long())


@pytest.mark.parametrize("way", ["gather", "ring"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_output_and_gradients_are_those_of_one_process(
    pool: Pool, way: str, ranks: int, causal: bool, kv_heads: int
) -> None:
    for errors in pool.run(ranks, attend, way, causal, kv_heads):
        assert max(errors) < 1e-13, errors


@pytest.mark.parametrize("way", ["gather", "ring"])
def test_so_they_are_in_bf16_as_far_as_it_goes(pool: Pool, way: str) -> None:
    for errors in pool.run(2, attend, way, True, 2, torch.bfloat16):
        assert max(errors) < 0.03, errors


@pytest.mark.parametrize("way", ["gather", "ring"])
@pytest.mark.parametrize("v_width", [6, 12])
def test_values_may_be_narrower_or_wider_than_keys(pool: Pool, way: str, v_width: int) -> None:
    for errors in pool.run(2, attend, way, True, 4, torch.float64, v_width):
        assert max(errors) < 1e-13, errors


Expected = dict[str, Any]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Expected]:
    return {name: pool.run(1, step, name, Plan())[0] for name in MODELS}


def assert_same(found: Expected, expected: Expected) -> None:
    torch.testing.assert_close(found["numbers"], expected["numbers"], rtol=1e-12, atol=0)
    for name, gradient in found["gradients"].items():
        scale = expected["gradients"][name].abs().max()
        # Of a key's bias the gradient is zero but for rounding.
        assert (gradient - expected["gradients"][name]).abs().max() <= 1e-11 * max(scale.item(), 1e-3), name


@pytest.mark.parametrize("way", ["gather", "ring"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_accuracy_and_gradients_of_a_model_are_those_of_one_process(
    pool: Pool, alone: dict[str, Expected], name: str, way: Any
) -> None:
    results = pool.run(4, step, name, Plan(mesh=Mesh(context=4), context_attention=way))
    for result in results:
        assert_same(result, alone[name])
    if name == "bert":
        assert len({result["counted"] for result in results}) > 1, "targets are meant to be uneven"


@pytest.mark.parametrize("options", [{"recompute": True}, {"compiled": True}], ids=["recompute", "compile"])
@pytest.mark.parametrize("way", ["gather", "ring"])
def test_recompute_and_compile_change_nothing(
    pool: Pool, alone: dict[str, Expected], way: Any, options: dict[str, bool]
) -> None:
    plan = Plan(mesh=Mesh(context=2), context_attention=way)
    recompute, compiled = options.get("recompute", False), options.get("compiled", False)
    for result in pool.run(2, step, "gpt rotary", plan, recompute, compiled):
        assert_same(result, alone["gpt rotary"])


def test_batches_are_divided_along_their_sequences_whatever_holds_them() -> None:
    tokens = torch.arange(16).view(2, 8)
    wanted = torch.tensor([[2, 3, 4, 5], [10, 11, 12, 13]])
    as_dict = split_sequence({"tokens": tokens, "targets": tokens, "name": "x"}, world_of(1, 2))
    assert torch.equal(as_dict["tokens"], wanted)
    assert as_dict["name"] == "x"
    assert torch.equal(split_sequence((tokens, tokens), world_of(1, 2))[1], wanted)
    assert split_sequence((tokens,), world_of(0, 1))[0] is tokens


def test_sequences_that_cannot_be_divided_are_refused_with_the_numbers() -> None:
    with pytest.raises(InputError, match=r"sequences of 10 tokens .*multiple of 4 tokens"):
        split_sequence((torch.zeros(2, 10),), world_of(0, 2))
    with pytest.raises(InputError, match="labels of the batch has one value for each sample"):
        split_sequence({"tokens": torch.zeros(2, 8), "labels": torch.zeros(2)}, world_of(0, 2))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(2, 2), "Linear has no attention layer"),
        (nn.TransformerEncoderLayer(8, 2, batch_first=True), "TransformerEncoderLayer has no attention layer"),
        (ViT(ViTSettings(image=8, patch=4, layers=1, width=8, heads=2)), "ViT has nothing that says where"),
    ],
)
def test_models_that_cannot_take_a_part_of_a_sequence_are_refused(model: nn.Module, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        apply_context(model, world_of(0, 2), Plan(mesh=Mesh(context=2)))
    assert caught.value.details == {"field": "plan.mesh.context", "found": 2, "allowed": 1}


def test_dropout_is_refused_in_the_ring_unless_the_plan_leaves_open_what_computes(pool: Pool) -> None:
    for message, details in pool.run(2, refusal_of_ring, 0.1):
        assert "dropout (0.1)" in message
        assert details["field"] == "plan.context_attention"


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_an_evaluation_of_split_sequences_is_that_of_one_process(pool: Pool, tmp_path: Path, model: str) -> None:
    rows = []
    for ranks in (1, 2):
        recipe = recipe_for(model, mesh={"context": ranks})
        directory = RunDirectory.create(tmp_path, f"on-{ranks}")
        pool.run(ranks, trained, str(directory.path), recipe)
        rows.append([row for row in read_metrics(directory) if "validation_loss" in row])
    one, split = rows
    assert len(one) == 2
    for found, expected in zip(split, one, strict=True):
        assert found["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-12)
        assert found["validation_accuracy"] == expected["validation_accuracy"] > 0


def test_a_users_mean_over_a_part_of_the_sequences_is_refused_on_all_ranks(pool: Pool, run: RunDirectory) -> None:
    recipe = recipe_for("gpt", mesh={"context": 2}, loss=f"{user_code.__file__}:mean_of_tokens")
    with pytest.raises(AssertionError) as caught:
        pool.run(2, trained, str(run.path), recipe)
    said = "InputError: the loss: found a mean over a rank's part of the sequences (plan.mesh.context 2)"
    assert str(caught.value).count(said) == 2
    assert not [row for row in read_metrics(run) if "loss" in row], "no step was made"


def test_a_users_sum_and_count_over_parts_give_the_loss_of_one_process(pool: Pool, tmp_path: Path) -> None:
    losses = []
    for ranks in (1, 2):
        recipe = recipe_for("gpt", mesh={"context": ranks}, loss=f"{user_code.__file__}:sum_of_tokens")
        directory = RunDirectory.create(tmp_path, f"on-{ranks}")
        pool.run(ranks, trained, str(directory.path), recipe)
        losses.append([row["loss"] for row in read_metrics(directory) if "loss" in row])
    one, split = losses
    assert len(one) == 2
    assert split == pytest.approx(one, rel=1e-12)
