"""The search follows the order of thought, keeps what is fixed, and prefers the simple to what gains little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner_cases import Formula, Unhurried, recipe, site, space

from gradus.planner.choice.candidates import complexity
from gradus.planner.choice.reasons import reasons, refused
from gradus.planner.choice.search import (
    GAIN_WORTH_IT,
    MOST_CHOICES,
    Found,
    Outcome,
    gain_worth_it,
    ranked,
    search,
    something_fits,
)
from gradus.schema.plan import Mesh, Plan


def best(state: float, *, ranks: int = 8, fixed: dict[str, Any] | None = None, batch: int = 64, **formula: Any) -> Plan:
    found = search(space(recipe(batch, **(fixed or {})), ranks), Formula(state, **formula))
    assert found.ranked, "nothing fits"
    return found.ranked[0].plan


def test_one_gpu_is_enough_for_what_fits_on_one() -> None:
    plan = best(10, ranks=1)
    assert (plan.mesh, plan.zero, plan.recompute, plan.micro_batch) == (Mesh(), 0, "none", 64)


def test_replicas_if_they_fit_then_shards_then_tensor_then_pipeline() -> None:
    assert best(50).mesh == Mesh(replicate=8)
    assert best(300).mesh == Mesh(shard=8)
    # Shards of the state would fit, but if sharding were dear, tensor in the node is next, and then the pipeline.
    assert best(300, costs={"shard": 9.0}).mesh.tensor > 1
    assert best(300, costs={"shard": 9.0, "tensor": 9.0}).mesh.pipeline > 1


def test_what_waits_on_the_host_comes_last() -> None:
    """700 GiB are more than eight GPUs of 80 have."""
    plan = best(700)
    assert plan.offload == "cpu"
    assert search(space(), Formula(600)).ranked[0].plan.offload == "none"


def test_the_largest_micro_batch_that_fits_and_no_recomputing_where_it_is_large() -> None:
    plan = best(72, ranks=8)
    assert (plan.micro_batch, plan.accumulate, plan.recompute) == (8, 1, "none")
    plan = best(72, ranks=8, sample=2)
    assert plan.micro_batch * 2 + 72 <= 80 or plan.recompute != "none"
    assert plan.micro_batch * plan.accumulate * plan.mesh.data_ranks == 64


def test_activations_that_do_not_fit_are_recomputed_as_little_as_possible() -> None:
    """100 GiB for a sample: half of them fit where the mesh is fixed, and all of them do not."""
    fixed = {"mesh": Mesh(replicate=8)}
    assert best(10, sample=100, fixed=fixed, costs={"full recompute": 0.2}).recompute == "selective"
    assert best(10, sample=200, fixed=fixed).recompute == "full"


@pytest.mark.parametrize(
    "fixed",
    [
        {"mesh": Mesh(shard=4, tensor=2)},
        {"zero": 2},
        {"micro_batch": 2},
        {"accumulate": 4},
        {"recompute": "full"},
        {"offload": "cpu", "zero": 3},
        {"precision": "fp32", "compile": False},
        {"mesh": Mesh(pipeline=4, replicate=2), "pipeline_schedule": "gpipe"},
        {"activation_offload": True},
    ],
    ids=str,
)
def test_what_the_recipe_fixes_stays(fixed: dict[str, Any]) -> None:
    found = search(space(recipe(**fixed)), Formula(50))
    assert found.ranked
    for outcome in found.ranked:
        for name, value in fixed.items():
            assert getattr(outcome.plan, name) == value


def test_every_plan_that_is_looked_at_is_legal() -> None:
    case = space(ranks=16, on=site(nodes=2))
    found = search(case, Formula(900, sample=9))
    assert len(found.considered) > 50
    for outcome in found.considered:
        outcome.plan.check(64, 16)
        Plan.model_validate(outcome.plan.model_dump())
        assert outcome.plan.mesh.tensor <= 8, "tensor stays in a node"


def outcome(seconds: float, **plan: Any) -> Outcome:
    return Outcome(Plan(**plan), "fits", seconds)


def test_a_simpler_plan_wins_unless_the_other_gains_enough() -> None:
    replicas = outcome(1.0, mesh=Mesh(replicate=8))
    little = outcome(1.0 / (1 + 0.9 * GAIN_WORTH_IT), mesh=Mesh(shard=8), zero=1)
    much = outcome(1.0 / (1 + 1.1 * GAIN_WORTH_IT), mesh=Mesh(tensor=8))
    assert ranked([little, replicas])[0] is replicas
    assert ranked([much, replicas])[0] is much
    assert complexity(replicas.plan) < complexity(little.plan) < complexity(much.plan)


def test_a_gain_within_the_jitter_of_a_step_is_none() -> None:
    replicas, stages = outcome(0.0044, mesh=Mesh(replicate=8)), outcome(0.0041, mesh=Mesh(pipeline=8))
    assert ranked([stages, replicas])[0] is replicas


def test_a_sixth_of_a_step_is_worth_more_parts_however_short_the_step() -> None:
    replicas, stages = outcome(0.0048, mesh=Mesh(replicate=8)), outcome(0.0041, mesh=Mesh(pipeline=8))
    assert ranked([stages, replicas])[0] is stages
    assert [gain_worth_it(seconds) / seconds for seconds in (0.004, 0.02, 10.0)] == pytest.approx([0.15, 0.1, 0.03])


def test_what_is_faster_and_not_chosen_is_said_to_be_faster() -> None:
    def said(*considered: Outcome) -> str:
        found = Found(ranked(considered, 1), list(considered))
        return "; ".join(entry["reason"] for entry in refused(found, space(), Formula(10)))

    replicas = outcome(1.0, mesh=Mesh(replicate=8))
    nearly = said(replicas, outcome(0.98, mesh=Mesh(pipeline=8)))
    assert "2.0% faster, but more parts: below 3% they are not worth it" in nearly
    tight = replace(outcome(0.8, mesh=Mesh(pipeline=8)), verdict="tight")
    assert "0.8 s a step, 20% faster, but memory is tight: " in said(replicas, tight)
    assert "1.5 s a step, 50% more than the best" in said(replicas, outcome(1.5, mesh=Mesh(pipeline=8)))
    short = said(outcome(0.0044, mesh=Mesh(replicate=8)), outcome(0.0041, mesh=Mesh(pipeline=8)))
    assert "6.8% faster, but more parts: below 15% they are not worth it in so short a step" in short


def test_what_fits_comes_before_what_is_tight_however_fast_that_is() -> None:
    tight = Outcome(Plan(mesh=Mesh(replicate=8)), "tight", 0.5)
    slow = outcome(9.0, mesh=Mesh(shard=8), zero=3)
    assert ranked([tight, slow]) == [slow, tight]
    assert ranked([Outcome(Plan(), "no")]) == []


def test_the_shortlist_is_short_and_of_distinct_ways() -> None:
    found = search(space(ranks=64), Formula(400))
    assert 1 < len(found.ranked) <= MOST_CHOICES
    ways = {(o.plan.mesh.pipeline, o.plan.mesh.tensor, o.plan.zero > 0, o.plan.offload) for o in found.ranked}
    assert len(ways) == len(found.ranked)
    assert len(search(space(ranks=64), Formula(400), most=3).ranked) == 3


def test_where_speed_is_not_known_the_simplest_that_fits_is_best() -> None:
    assert search(space(), Unhurried(50)).ranked[0].plan.mesh == Mesh(replicate=8)
    assert search(space(), Unhurried(300)).ranked[0].plan.mesh == Mesh(shard=8)


def test_the_first_that_fits_is_found_without_asking_for_time() -> None:
    class Mute(Formula):
        def seconds(self, plan: Plan) -> float | None:
            raise AssertionError("nobody asked")

    plan = something_fits(space(), Mute(300))
    assert plan is not None
    assert plan.mesh == Mesh(shard=8)
    assert something_fits(space(), Mute(700)) is None
    assert something_fits(space(), Mute(700), offload=True) is not None


def said(state: float, **more: Any) -> tuple[Found, dict[str, str], list[dict[str, str]]]:
    where, formula = space(**more), Formula(state)
    found = search(where, formula)
    return found, reasons(found.ranked[0], found, where, formula), refused(found, where, formula)


def test_every_choice_has_a_reason_with_numbers() -> None:
    _, why, _ = said(50)
    assert why["mesh"] == "8 ranks, each with the whole model: 58.0 GiB of 80.0"
    assert why["micro_batch"] == "all 8 samples of a rank at once"
    assert why["recompute"] == "fits without: 58.0 GiB of 80.0"
    _, why, out = said(300)
    assert why["zero"].startswith("zero ")
    assert "over 8: replicas need 300.1 GiB of 80.0" in why["zero"]
    assert why["mesh"].startswith("shard 8: without it")
    assert {
        "plan": "replicate 8, full recompute, micro-batch 1",
        "reason": "needs 300.1 GiB of 80.0: optimizer 300.0",
    } in out


def test_a_choice_that_another_would_beat_in_speed_alone_says_so() -> None:
    found, why, _ = said(300, ranks=8)
    assert found.ranked[0].plan.mesh.shard == 8
    assert {"mesh", "zero", "micro_batch", "accumulate", "recompute", "precision", "compile"} <= why.keys()
    assert all(why.values())


def test_a_fixed_field_is_said_to_be_fixed() -> None:
    _, why, _ = said(50, of=recipe(micro_batch=2))
    assert why["micro_batch"] == "fixed by the recipe"


def test_what_was_not_chosen_is_a_handful_and_none_of_it_is_in_the_shortlist() -> None:
    _, _, out = said(700, ranks=8)
    assert 1 <= len(out) <= 6
    titles = [entry["plan"] for entry in out]
    assert len(set(titles)) == len(titles)
    assert any(title.startswith("replicate 8") for title in titles)
