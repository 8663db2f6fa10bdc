"""Candidates are what can be and may pay: by the rules that refuse the rest, and by what is never better."""

from __future__ import annotations

import pytest
from planner_cases import recipe, site, space

from gradus.planner.choice.candidates import Extras, candidates, meshes, micro_batches, space_of, with_micro_batch
from gradus.planner.profile.program import Amount, ModelProfile, Operator, Part, Weights
from gradus.schema.plan import Mesh


def shapes(**more: object) -> list[Mesh]:
    return meshes(space(**more))  # type: ignore[arg-type]


def test_meshes_use_all_ranks_and_share_the_batch() -> None:
    for ranks in (1, 2, 6, 8, 16, 64):
        found = shapes(ranks=ranks, of=recipe(batch=48))
        assert found
        assert all(mesh.world_size == ranks and 48 % mesh.data_ranks == 0 for mesh in found)
        assert len(set(found)) == len(found)


def test_the_simplest_come_first() -> None:
    assert shapes()[:2] == [Mesh(replicate=8), Mesh(shard=8)]


def test_tensor_stays_in_the_node_and_divides_the_heads() -> None:
    assert {mesh.tensor for mesh in shapes(ranks=32, on=site(nodes=4))} == {1, 2, 4, 8}
    assert {mesh.tensor for mesh in shapes(ranks=32, on=site(nodes=8, gpus=4))} == {1, 2, 4}
    assert {mesh.tensor for mesh in shapes(of=recipe(model={"heads": 4}))} == {1, 2, 4}


def test_a_pipeline_has_no_more_stages_than_blocks_and_about_as_many_on_each() -> None:
    assert {mesh.pipeline for mesh in shapes(ranks=16, of=recipe(model={"layers": 8}))} == {1, 2, 4, 8}
    assert {mesh.pipeline for mesh in shapes(of=recipe(model={"layers": 3}))} == {1}, (
        "one stage would be twice the other"
    )


def test_context_is_divided_where_samples_are_long_or_nothing_else_fits() -> None:
    long = recipe(model={"context": 16384})
    short = recipe(model={"context": 4096})
    assert {mesh.context for mesh in shapes(of=long)} == {1, 2, 4}
    assert {mesh.context for mesh in shapes(of=short)} == {1}
    assert {mesh.context for mesh in meshes(space(short), Extras(short_context=True))} > {1}


def test_experts_are_spread_over_ranks_that_share_parameters() -> None:
    mixture = recipe(model={"experts": 4, "experts_per_token": 2})
    found = shapes(of=mixture)
    assert {mesh.expert for mesh in found} == {1, 2, 4}
    assert all(mesh.shards % mesh.expert == 0 for mesh in found)
    assert {mesh.tensor for mesh in found} == {1}, "experts are not split by tensor"


def test_a_model_of_images_is_neither_cut_into_stages_nor_divided() -> None:
    images = recipe().model_copy(
        update={"model": type(recipe().model)(use="resnet18"), "data": type(recipe().data)(use="synthetic-images")}
    )
    assert {(mesh.tensor, mesh.pipeline, mesh.context) for mesh in shapes(of=images)} == {(1, 1, 1)}
    for plan in candidates(space(images)):
        assert micro_batches(space(images), plan) == [8], "batch statistics are those of the whole batch"


def test_a_pipeline_gets_at_least_as_many_micro_batches_as_stages() -> None:
    where = space(recipe(mesh=Mesh(pipeline=4, replicate=2)))
    for plan in candidates(where):
        for size in micro_batches(where, plan):
            assert with_micro_batch(where, plan, size).accumulate >= 4


def test_what_a_fixed_field_does_not_allow_is_no_candidate() -> None:
    assert all(plan.zero == 2 for plan in candidates(space(recipe(zero=2))))
    where = space(recipe(micro_batch=5))
    assert all(micro_batches(where, plan) == [] for plan in candidates(where)), "5 does not divide a share of 64"


def test_offload_is_only_thought_of_when_it_is_asked_for() -> None:
    assert {plan.offload for plan in candidates(space())} == {"none"}
    found = list(candidates(space(), Extras(offload=True)))
    assert {plan.offload for plan in found} == {"none", "cpu"}
    assert all(plan.offload == "cpu" or plan.activation_offload for plan in found)


def attention(heads: int, divides: str) -> ModelProfile:
    numbers = (Amount(0, 1), Amount(heads), Amount(heads), Amount(8), Amount(8), Amount(16))
    nothing = Amount()
    operator = Operator("flash", "attention", nothing, nothing, nothing, "bfloat16", numbers, divides=divides)  # type: ignore[arg-type]
    part = Part("blocks.0", True, forward=(operator,), weights=(Weights(100, divides=divides),))  # type: ignore[arg-type]
    return ModelProfile("own", (part,), (0, 0, 0, 0), "bf16", False, (2, 4))


@pytest.mark.parametrize(
    ("heads", "divides", "ways"), [(12, "tensor", {1, 2, 4}), (12, "whole", {1}), (7, "tensor", {1})]
)
def test_of_a_model_that_only_a_trace_knows_heads_and_divided_layers_come_from_there(heads, divides, ways) -> None:
    where = space_of(recipe(), site(), 8, attention(heads, divides))
    assert {mesh.tensor for mesh in meshes(where)} == ways
