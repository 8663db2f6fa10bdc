"""Experts spread over ranks: the same numbers as in one process, each rank with its own experts only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import BATCH, SMALL, built_on_meta, trained
from pool import Pool

from gradus.models import catalogue
from gradus.models.experts import MixtureOfExperts
from gradus.parallel.expert import ExpertLoads, apply_experts
from gradus.parallel.world import World, alone
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan

LOSS: dict[str, Any] = {"balance": "loss", "shared_experts": 1}
BIAS: dict[str, Any] = {"balance": "bias", "balance_rate": 0.01, "router": "sigmoid", "activation": "swiglu"}
CAPACITY: dict[str, Any] = {"capacity_factor": 1.0}


def plan_for(mesh: dict[str, int], zero: int = 0, accumulate: int = 1) -> Plan:
    on = Mesh(**mesh)
    return Plan(mesh=on, zero=zero, accumulate=accumulate, micro_batch=BATCH // (on.data_ranks * accumulate))


@pytest.fixture(scope="module")
def one_process(pool: Pool):
    """Runs of one process, each done once."""
    done: dict[str, Any] = {}

    def of(options: dict[str, Any], real: int) -> dict[str, Any]:
        key = f"{options} {real}"
        if key not in done:
            done[key] = pool.run(1, trained, options, plan_for({}), 5, real)[0]
        return done[key]

    return of


@pytest.mark.parametrize(
    ("mesh", "zero", "accumulate", "options", "real"),
    [
        pytest.param({"replicate": 2}, 0, 1, LOSS, BATCH, id="replicate 2, not spread"),
        pytest.param({"shard": 2}, 3, 1, LOSS, 3, id="shard 2, not spread, one rank with padding"),
        pytest.param({"shard": 2, "expert": 2}, 3, 1, LOSS, BATCH, id="expert 2"),
        pytest.param({"shard": 2, "expert": 2}, 1, 2, BIAS, BATCH, id="expert 2, bias, accumulate"),
        pytest.param({"shard": 4, "expert": 4}, 2, 1, LOSS, 3, id="expert 4, two ranks with padding"),
        pytest.param({"shard": 4, "expert": 2}, 3, 1, LOSS, BATCH, id="expert 2 × shard 2"),
        pytest.param({"shard": 4, "expert": 2}, 2, 2, BIAS, 5, id="expert 2 × shard 2, bias, accumulate, padding"),
        pytest.param({"replicate": 2, "shard": 2, "expert": 2}, 3, 1, LOSS, BATCH, id="replicate 2 × expert 2"),
        pytest.param({"shard": 2, "expert": 2}, 2, 1, CAPACITY, BATCH, id="expert 2, with capacity"),
    ],
)
def test_loss_norm_weights_and_loads_are_those_of_one_process(
    pool: Pool, one_process: Any, mesh: dict[str, int], zero: int, accumulate: int, options: dict[str, Any], real: int
) -> None:
    one = one_process(options, real)
    plan = plan_for(mesh, zero, accumulate)
    for found in pool.run(plan.mesh.world_size, trained, options, plan, 5, real):
        for row, expected in zip(found["rows"], one["rows"], strict=True):
            assert row == pytest.approx(expected, rel=1e-9)
        for name, weight in one["weights"].items():
            scale = weight.abs().max().clamp(min=1e-30)
            assert ((found["weights"][name] - weight).abs().max() / scale).item() < 1e-9, name
    if "capacity_factor" in options:
        assert one["rows"][0]["tokens_dropped"] > 0
    if options.get("balance") == "bias":
        assert one["weights"]["blocks.0.mlp.router.bias"].abs().max() > 0


def test_a_rank_holds_its_experts_and_its_share_of_them(pool: Pool) -> None:
    whole = SMALL["experts"] * SMALL["expert_inner"] * SMALL["width"]
    for mesh, parts in (({"shard": 2, "expert": 2}, 2), ({"shard": 4, "expert": 2}, 4)):
        plan = plan_for(mesh, zero=3)
        for found in pool.run(plan.mesh.world_size, trained, {}, plan, 1):
            assert found["held"]["blocks.0.mlp.experts.up"] == whole // parts
            assert found["held"]["blocks.1.mlp.experts.down"] == whole // parts


def test_a_model_without_memory_is_spread_and_sharded(pool: Pool) -> None:
    for found in pool.run(4, built_on_meta, plan_for({"shard": 4, "expert": 2}, zero=3)):
        assert found == {"up": (4, 8, 16), "local": (2, 4, 16), "device": "meta", "experts_held": 0.25}


def test_what_cannot_be_spread_is_refused_with_the_numbers(pool: Pool) -> None:
    plan = plan_for({"shard": 2, "expert": 2}, zero=3)
    for found in pool.run(2, refusal, {"experts": None, "experts_per_token": 2, "expert_inner": None}, plan):
        assert "has no experts to spread" in found
    for found in pool.run(2, refusal, {"experts": 5}, plan):
        assert "5 experts, which 2 ranks cannot share evenly" in found


def refusal(world: World, options: dict[str, Any], plan: Plan) -> str:
    try:
        apply_experts(catalogue.build("gpt", {**SMALL, **options}), world.arranged(plan.mesh))
    except InputError as error:
        return error.message
    return "nothing was refused"


def test_the_numbers_of_a_step_are_the_busiest_expert_over_the_mean_and_the_share_of_dropped_choices() -> None:
    model = catalogue.build("gpt", {**SMALL, "balance": "bias", "balance_rate": 0.5})
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    mixtures[0].load.copy_(torch.tensor([8, 0, 4, 4, 2]))
    mixtures[1].load.copy_(torch.tensor([4, 4, 4, 4, 6]))
    numbers = ExpertLoads(model, alone(torch.device("cpu"))).settle()
    assert {name: value.item() for name, value in numbers.items()} == {
        "expert_load_max_over_mean": (2.0 + 1.0) / 2,
        "tokens_dropped": 8 / 32,
    }
    assert mixtures[0].router.bias is not None
    assert mixtures[0].router.bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert all(mixture.load.sum() == 0 for mixture in mixtures)


def test_a_model_without_experts_has_no_such_numbers() -> None:
    model = catalogue.build("gpt", {"layers": 1, "width": 8, "heads": 2})
    assert ExpertLoads(model, alone(torch.device("cpu"))).settle() == {}
