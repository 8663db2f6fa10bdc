"""Predicted memory against a real training step on CPU, as torch's own tracker of tensors sees it.

In fp32, where the CPU keeps for backward what a GPU does; what differs between the two is for a GPU to show. Of DDP the
tracker does not see the buckets.
"""

from __future__ import annotations

from typing import Any

import pytest
from pool import Pool
from tracked_memory_cases import tracked_peak

from gradus.planner.memory.device_memory import NO_GPU
from gradus.planner.memory.rank_memory import MemoryFacts, predicted_memory
from gradus.planner.profile.of_recipe import profile_of
from gradus.planner.profile.program import ModelProfile
from gradus.planner.resolve import resolved
from gradus.schema.recipe import Recipe

GPT = {"use": "gpt", "layers": 6, "width": 128, "heads": 4, "context": 128, "vocabulary": 1024}
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "accumulation": {"accumulate": 2},
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "selective, some blocks": {"recompute": "selective", "recompute_blocks": 2},
    "recompute, some blocks": {"recompute": "full", "recompute_blocks": 4},
    "zero 3, some blocks": {"mesh": {"shard": 4}, "zero": 3, "recompute": "full", "recompute_blocks": 3},
    "zero 1": {"mesh": {"shard": 4}, "zero": 1},
    "zero 1, accumulation": {"mesh": {"shard": 4}, "zero": 1, "accumulate": 2},
    "zero 2, accumulation": {"mesh": {"shard": 4}, "zero": 2, "accumulate": 2},
    "zero 3": {"mesh": {"shard": 4}, "zero": 3},
    "zero 3, accumulation": {"mesh": {"shard": 4}, "zero": 3, "accumulate": 2},
    "zero 3, recompute": {"mesh": {"shard": 4}, "zero": 3, "recompute": "full"},
    "tensor": {"mesh": {"tensor": 2}},
    "tensor, whole sequence": {"mesh": {"tensor": 2}, "sequence_parallel": False},
    "1f1b": {"mesh": {"pipeline": 2}, "accumulate": 4},
    "gpipe": {"mesh": {"pipeline": 2}, "accumulate": 4, "pipeline_schedule": "gpipe"},
    "interleaved": {
        "mesh": {"pipeline": 2},
        "accumulate": 8,
        "pipeline_schedule": "interleaved",
        "stages_per_rank": 2,
    },
}


EXPERTS = {"experts": 4, "experts_per_token": 2}


def recipe_of(plan: dict[str, Any], *, tied: bool, **model: Any) -> Recipe:
    mesh = plan.get("mesh", {})
    batch = 4 * plan.get("accumulate", 1) * mesh.get("shard", 1)
    return resolved(
        Recipe.from_document(
            {
                "name": "tracked",
                "model": {**GPT, "tied": tied, **model},
                "data": {"use": "synthetic-tokens"},
                "batch": batch,
                "steps": 2,
                "optimizer": {"use": "adamw", "lr": 1e-3, "clip": 1.0},
                "plan": {"micro_batch": 4, **plan},
            }
        )
    )


@pytest.fixture(scope="module")
def profiles() -> dict[bool, ModelProfile]:
    return {tied: profile_of(recipe_of({}, tied=tied), precision="fp32", capability=(9, 0)) for tied in (False, True)}


def test_experts_are_divided_over_ranks_like_all_else(pool: Pool) -> None:
    recipe = recipe_of({"mesh": {"shard": 2}, "zero": 3}, tied=False, **EXPERTS)
    found = predicted_memory(
        profile_of(recipe, precision="fp32", capability=(9, 0)), recipe.plan, MemoryFacts(device=NO_GPU)
    )
    (tracked,) = pool.run(1, tracked_peak, recipe)
    assert found.memory.peak == pytest.approx(tracked, rel=0.01)


def test_activations_on_the_host_are_those_that_are_not_on_the_device(
    pool: Pool, profiles: dict[bool, ModelProfile]
) -> None:
    """On a CPU the tracker sees both as one."""
    recipe = recipe_of({"activation_offload": True}, tied=False)
    found = predicted_memory(profiles[False], recipe.plan, MemoryFacts(device=NO_GPU))
    (tracked,) = pool.run(1, tracked_peak, recipe)
    assert found.host.offload > 0.4 * tracked
    assert found.memory.peak + found.host.offload == pytest.approx(tracked, rel=0.01)


@pytest.mark.parametrize("plan", [{}, {"mesh": {"shard": 4}, "zero": 3}])
@pytest.mark.parametrize("capability", [None, (9, 0)])  # without the kernel, and with it
def test_a_loss_in_chunks_needs_no_memory_for_all_logits(
    pool: Pool, plan: dict[str, Any], capability: tuple[int, int] | None
) -> None:
    if capability is not None:
        pytest.importorskip("triton")
    peaks = {}
    for chunks in (1, 8):
        recipe = recipe_of({**plan, "loss_chunks": chunks}, tied=True, vocabulary=16384)
        profile = profile_of(recipe, precision="fp32", capability=capability, loss_chunks=chunks)
        peaks[chunks] = predicted_memory(profile, recipe.plan, MemoryFacts(device=NO_GPU)).memory.peak
        tracked = max(pool.run(1, tracked_peak, recipe, capability is not None))
        # The peak is then in the head's forward pass, where the last gathered block is still there, 1 % here.
        assert peaks[chunks] == pytest.approx(tracked, rel=0.02 if chunks > 1 else 0.01)
    logits = 4 * 128 * 16384 * 4
    assert peaks[8] < peaks[1] - logits


@pytest.mark.parametrize("accumulate", [1, 3])
def test_weights_in_16_bits_are_counted_beside_the_parameters(pool: Pool, accumulate: int) -> None:
    tracked, predicted = {}, {}
    for narrow in (False, True):
        plan = {"precision": "bf16", "narrow_weights": narrow, "accumulate": accumulate}
        recipe = recipe_of(plan, tied=True, vocabulary=64, layers=6)
        profile = profile_of(recipe, precision="bf16", capability=(9, 0), narrow_parameters=narrow)
        predicted[narrow] = predicted_memory(profile, recipe.plan, MemoryFacts(device=NO_GPU)).memory.peak
        (tracked[narrow],) = pool.run(1, tracked_peak, recipe)
    assert predicted == pytest.approx(tracked, rel=0.001)


TIED_TOO = ("one rank", "accumulation", "zero 3", "tensor")  # the rest of them with slow tests


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        pytest.param(name, tied, marks=[pytest.mark.slow] if tied and name not in TIED_TOO else [])
        for name in PLANS
        for tied in (False, True)
    ],
)
def test_the_predicted_peak_is_that_of_a_real_step(
    pool: Pool, profiles: dict[bool, ModelProfile], name: str, tied: bool
) -> None:
    recipe = recipe_of(PLANS[name], tied=tied)
    found = predicted_memory(profiles[tied], recipe.plan, MemoryFacts(device=NO_GPU))
    predicted = found.memory.peak
    # Stages of a pipeline tell each other what they send, and need each other; other ranks can be made up.
    tracked = max(pool.run(recipe.plan.mesh.pipeline, tracked_peak, recipe))
    print(f"\n{name}: predicted {predicted:,}, tracked {tracked:,} ({predicted / tracked - 1:+.1%}), {found.peak_at}")
    assert predicted == pytest.approx(tracked, rel=0.01)
