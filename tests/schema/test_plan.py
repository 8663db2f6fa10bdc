"""A plan that cannot be is refused with the numbers; one that can be is a file with its reasons."""

import pytest

from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan


@pytest.mark.parametrize(
    ("plan", "batch", "ranks", "field", "found", "numbers"),
    [
        (Plan(mesh=Mesh(replicate=4)), 4, 2, "plan.mesh", 4, ["replicate 4", "4 ranks", "there are 2"]),
        (Plan(mesh=Mesh(tensor=2, pipeline=3)), 1, 4, "plan.mesh", 6, ["pipeline 3 × tensor 2", "6 ranks", "4"]),
        (Plan(mesh=Mesh(shard=2)), 2, 2, "plan.zero", 0, ["found 0", "mesh.shard is 2"]),
        (Plan(zero=3), 1, 1, "plan.zero", 3, ["found 3", "mesh.shard is 1"]),
        (
            Plan(mesh=Mesh(shard=2, context=2, expert=3), zero=1),
            2,
            4,
            "plan.mesh.expert",
            3,
            ["3 does not divide", "shard 2", "context 2", "= 4"],
        ),
        (Plan(micro_batch=3, accumulate=2), 8, 1, "batch", 8, ["8 samples", "micro_batch 3", "accumulate 2", "= 6"]),
        (Plan(mesh=Mesh(replicate=2), micro_batch=4), 12, 2, "batch", 12, ["12 samples", "2 data ranks", "= 8"]),
    ],
)
def test_each_impossible_combination_is_refused_with_the_numbers(plan, batch, ranks, field, found, numbers):
    with pytest.raises(InputError) as caught:
        plan.check(batch, ranks)
    assert caught.value.details["field"] == field
    assert caught.value.details["found"] == found
    assert "allowed" in caught.value.details
    assert caught.value.hint
    for number in numbers:
        assert number in caught.value.message


def hint_of(plan, batch, ranks):
    with pytest.raises(InputError) as caught:
        plan.check(batch, ranks)
    return caught.value.hint


def test_a_batch_that_the_plan_can_split_is_offered_and_a_plan_that_can_split_the_batch():
    hint = hint_of(Plan(micro_batch=3, accumulate=2), 8, 1)
    assert hint == "a batch that this plan can split: 6; for batch 8: plan.micro_batch=2, plan.accumulate=4"
    Plan(micro_batch=3, accumulate=2).check(6, 1)
    Plan(micro_batch=2, accumulate=4).check(8, 1)
    assert hint_of(Plan(mesh=Mesh(replicate=4)), 6, 4) == "a batch that this plan can split: 8"


def test_where_zero_and_shard_do_not_fit_both_ways_out_are_offered():
    assert hint_of(Plan(mesh=Mesh(replicate=2, shard=4)), 8, 8) == (
        "use plan.zero=3, or plan.mesh.replicate=8 in place of shard"
    )
    assert hint_of(Plan(mesh=Mesh(replicate=4), zero=1), 4, 4) == (
        "use plan.zero=0, or plan.mesh.shard=4 in place of replicate"
    )
    assert hint_of(Plan(zero=1), 1, 1) == "use plan.zero=0, or more ranks"


def test_parameters_are_sharded_over_shard_and_context():
    assert Mesh(replicate=2, shard=4, context=2, tensor=2).shards == 8


@pytest.mark.parametrize(
    ("plan", "batch", "ranks"),
    [
        (Plan(), 1, 1),
        (Plan(mesh=Mesh(replicate=2, shard=4, tensor=2), zero=2, micro_batch=2, accumulate=3), 48, 16),
        (Plan(mesh=Mesh(shard=2, context=2, expert=4), zero=3, micro_batch=2), 4, 4),
        (Plan(mesh=Mesh(pipeline=4), micro_batch=1, accumulate=8), 8, 4),
    ],
)
def test_a_possible_combination_passes(plan, batch, ranks):
    plan.check(batch, ranks)


def test_a_plan_with_its_reasons_reads_back_as_the_same_plan(tmp_path):
    plan = Plan(mesh=Mesh(replicate=2, tensor=4), micro_batch=3, precision="bf16", checkpoint_every=7, workers=2)
    path = tmp_path / "plan.yaml"
    text = plan.to_yaml({"mesh": "8 ranks: 2 × 4", "workers": "3 cores # one for the rank"})
    path.write_text(text)
    assert " # 8 ranks: 2 × 4" in text
    assert Plan.load(path) == plan
    path.write_text(plan.to_yaml())
    assert Plan.load(path) == plan


def test_a_plan_file_with_a_near_miss_is_refused(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("mesh: {replicat: 2}\n")
    with pytest.raises(InputError, match="did you mean 'replicate'") as caught:
        Plan.load(path)
    assert caught.value.details["field"] == "mesh.replicat"
    assert caught.value.details["file"] == str(path)
