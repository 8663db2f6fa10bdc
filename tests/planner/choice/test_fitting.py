"""Why memory ran out, and what would fit: the 2.5 billion parameters of lab 2 under 32 GiB, and small numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradus.planner.choice.fitting import GIB, Shortage, binding_term, changes_that_fit
from gradus.planner.memory.model_state import ModelSize, ModelState, expected_state
from gradus.schema.plan import Mesh, Plan
from gradus.schema.prediction import MemoryPrediction

BERT = ModelSize(parameters=2_472_627_289, trained=2_471_577_689, outside_blocks=54_266_969, largest_block=12_596_224)


def shortage(size: ModelSize = BERT, limit_gib: float = 32, used_gib: float = 31, **changes: Any) -> Shortage:
    plan = Plan(**{"precision": "bf16", "micro_batch": 4, **changes.pop("plan", {})})
    held = changes.pop("held", replace(expected_state(size, plan), optimizer=0))
    limit = round(limit_gib * GIB)
    return Shortage(
        "a test", plan, changes.pop("batch", 4), held, round(used_gib * GIB), None, limit, "", size, **changes
    )


def test_under_32_gib_the_optimizer_state_of_two_and_a_half_billion_parameters_binds() -> None:
    found = shortage()
    assert binding_term(found) == "optimizer state"
    assert found.expected is not None
    assert found.expected.total / GIB == pytest.approx(36.8, abs=0.05)
    assert not found.state_fits


def test_what_fits_then_is_sharding_and_no_micro_batch() -> None:
    """18.42 GiB are bf16 weights, fp32 master and Adam state; gradients come to that."""
    changes = changes_that_fit(shortage(used_gib=19))
    first = changes[0]
    assert first.keys == {"plan.mesh.shard": 2, "plan.zero": 1}
    assert first.ranks == 2
    assert (first.state.total - first.state.gradients) / GIB == pytest.approx(18.42, rel=0.001)
    assert all("plan.micro_batch" not in change.keys for change in changes)
    assert all(change.total_bytes <= 32 * GIB for change in changes)


def test_a_higher_stage_is_named_only_where_it_needs_fewer_ranks() -> None:
    """Gathered parameters alone are 4.6 GiB: under 10 GiB, zero 1 must divide the rest further than zero 3."""
    changes = changes_that_fit(shortage(limit_gib=10, used_gib=19, batch=64, plan={"micro_batch": 64}))
    sharded = [change for change in changes if "plan.offload" not in change.keys]
    stages, ranks = [change.keys["plan.zero"] for change in sharded], [change.ranks for change in sharded]
    assert stages == [1, 3]
    assert ranks[0] > ranks[1]


SMALL = ModelSize(parameters=1000, trained=1000, outside_blocks=0, largest_block=100)


def small(**changes: Any) -> Shortage:
    """State of 16,000 bytes and 8,000 of activations where 20,000 fit."""
    plan = Plan(**{"micro_batch": 8, **changes.pop("plan", {})})
    state = expected_state(SMALL, plan)
    used = state.total + 8000
    return Shortage("a test", plan, 8, state, used, 100, changes.pop("limit", 20_000), "", SMALL, **changes)


def test_where_state_fits_activations_bind_and_the_micro_batch_is_the_first_change() -> None:
    assert binding_term(small()) == "activations"
    first, second, third = changes_that_fit(small())[:3]
    assert first.keys == {"plan.micro_batch": 4, "plan.accumulate": 2}
    assert first.activation_bytes == 4000
    assert second.keys == {"plan.recompute": "full"}
    assert second.activation_bytes == 800, "one of ten blocks at a time"
    assert third.keys == {"plan.precision": "bf16"}


def test_blocks_that_were_spared_are_recomputed_too() -> None:
    plan = {"recompute": "full", "recompute_blocks": 2}
    keys = [change.keys for change in changes_that_fit(small(plan=plan))]
    assert {"plan.recompute_blocks": None} in keys
    plan = {"recompute": "selective", "recompute_blocks": 2}
    keys = [change.keys for change in changes_that_fit(small(plan=plan))]
    assert {"plan.recompute": "full", "plan.recompute_blocks": None} in keys


def test_logits_at_the_worst_moment_are_cut_before_anything_else() -> None:
    predicted = MemoryPrediction(parameters=4000, gradients=4000, optimizer=8000, activations=1600, logits=6400)
    first, second = changes_that_fit(small(predicted=predicted, allows_chunks=True))[:2]
    assert first.keys == {"plan.loss_chunks": 8}
    assert first.activation_bytes == 1600 + 800
    assert second.keys == {"plan.micro_batch": 4, "plan.accumulate": 2}
    for other in ({}, {"allows_chunks": True, "plan": {"loss_chunks": 2}}):
        assert "plan.loss_chunks" not in changes_that_fit(small(predicted=predicted, **other))[0].keys


def test_a_tighter_limit_wants_a_smaller_micro_batch() -> None:
    assert changes_that_fit(small(limit=17_500))[0].keys == {"plan.micro_batch": 1, "plan.accumulate": 8}


def test_what_is_there_already_is_no_change() -> None:
    plan = {"mesh": Mesh(shard=2), "zero": 3, "precision": "bf16", "recompute": "full", "offload": "cpu"}
    found = [key for change in changes_that_fit(small(plan=plan, limit=10**6)) for key in change.keys]
    assert set(found) <= {"plan.micro_batch", "plan.accumulate", "plan.mesh.shard"}


def test_replicas_become_shards() -> None:
    plan = {"mesh": Mesh(replicate=4), "micro_batch": 2}
    change = next(c for c in changes_that_fit(small(plan=plan, limit=17_000)) if "plan.zero" in c.keys)
    assert change.keys == {"plan.mesh.shard": 4, "plan.zero": 1, "plan.mesh.replicate": 1}


def test_a_micro_batch_that_the_recipe_gives_is_cut_where_ranks_are_added() -> None:
    fixed = frozenset({"micro_batch"})
    change = next(c for c in changes_that_fit(small(limit=17_000, fixed=fixed)) if "plan.zero" in c.keys)
    assert change.keys == {"plan.mesh.shard": 2, "plan.zero": 1, "plan.micro_batch": 4}


def test_a_device_without_bf16_is_not_told_to_use_it() -> None:
    assert all("plan.precision" not in change.keys for change in changes_that_fit(small(allows_bf16=False)))


def test_a_model_of_unknown_size_has_no_predictions() -> None:
    assert changes_that_fit(replace(small(), size=None, held=ModelState())) == []
