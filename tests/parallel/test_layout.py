"""Which ranks form which group: one pure function, the same as torch's device mesh, for any shape."""

from __future__ import annotations

import itertools
import random

import pytest
from layout_cases import groups_of_torch
from pool import Pool

from gradus.parallel.layout import DIMENSIONS, Place, group_size, groups, nodes_spanned, place_of, rank_at
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh

SHAPES = [
    Mesh(),
    Mesh(replicate=5),
    Mesh(tensor=4, pipeline=4, replicate=2),
    Mesh(replicate=2, pipeline=3, shard=2, context=2, tensor=2, expert=4),
    Mesh(shard=4, context=2, expert=2),
    Mesh(shard=6, tensor=2, expert=3),
    Mesh(replicate=3, shard=2, context=3, expert=6),
]
every_shape = pytest.mark.parametrize("mesh", SHAPES, ids=str)


@every_shape
def test_every_place_is_taken_by_one_rank(mesh):
    places = [place_of(rank, mesh) for rank in range(mesh.world_size)]
    assert len({(*(getattr(place, name) for name in DIMENSIONS),) for place in places}) == mesh.world_size
    for rank, place in enumerate(places):
        assert rank_at(place, mesh) == rank
        for name in (*DIMENSIONS, "expert"):
            assert 0 <= getattr(place, name) < getattr(mesh, name)


def test_tensor_counts_fastest_and_replicate_slowest():
    mesh = Mesh(replicate=2, pipeline=2, shard=2, context=2, tensor=2)
    assert place_of(1, mesh) == Place(tensor=1)
    assert place_of(2, mesh) == Place(context=1)
    assert place_of(4, mesh) == Place(shard=1)
    assert place_of(8, mesh) == Place(pipeline=1)
    assert place_of(16, mesh) == Place(replicate=1)
    assert place_of(31, mesh) == Place(1, 1, 1, 1, 1)


@every_shape
def test_groups_divide_all_ranks_into_equal_parts_that_differ_only_there(mesh):
    every = [names for count in range(6) for names in itertools.combinations(DIMENSIONS, count)]
    for names in every:
        found = groups(mesh, names)
        assert sorted(rank for group in found for rank in group) == list(range(mesh.world_size))
        assert {len(group) for group in found} == {group_size(mesh, names)}
        for group in found:
            assert group == sorted(group)
            places = [place_of(rank, mesh) for rank in group]
            for name in set(DIMENSIONS) - set(names):
                assert len({getattr(place, name) for place in places}) == 1


@every_shape
def test_two_dimensions_cross_in_one_rank(mesh):
    for first, second in itertools.combinations(DIMENSIONS, 2):
        for one, other in itertools.product(groups(mesh, [first]), groups(mesh, [second])):
            assert len(set(one) & set(other)) <= 1


@every_shape
def test_expert_groups_lie_inside_the_shards_and_hold_each_part_of_the_experts_once(mesh):
    found = groups(mesh, ["expert"])
    assert sorted(rank for group in found for rank in group) == list(range(mesh.world_size))
    shards = groups(mesh, ["shard", "context"])
    for group in found:
        assert [place_of(rank, mesh).expert for rank in group] == list(range(mesh.expert))
        assert sum(set(group) <= set(shard) for shard in shards) == 1, "in one group of shard × context"


def test_neighbours_share_experts():
    assert groups(Mesh(shard=4, tensor=2, expert=2), ["expert"]) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(Mesh(shard=2, context=2, expert=4), ["expert"]) == [[0, 1, 2, 3]]


def test_the_published_layout_has_two_stages_on_each_node_and_no_tensor_group_across():
    mesh = Mesh(tensor=4, pipeline=4, replicate=2)
    assert nodes_spanned(mesh, "tensor", 8) == 1
    assert nodes_spanned(mesh, "pipeline", 8) == 2
    for node in range(4):
        assert len({place_of(rank, mesh).pipeline for rank in range(8 * node, 8 * node + 8)}) == 2
    assert nodes_spanned(mesh, "tensor", 6) == 2, "four slices do not fill nodes of six evenly"


def test_a_rank_or_a_dimension_that_is_not_there_is_an_error():
    for rank in (-1, 8):
        with pytest.raises(AssertionError):
            place_of(rank, Mesh(tensor=4, shard=2))
    for names in (["tensr"], ["expert", "shard"]):
        with pytest.raises(AssertionError):
            groups(Mesh(shard=2, expert=2), names)


TORCH_SHAPES = [
    Mesh(replicate=2, tensor=2),
    Mesh(pipeline=2, shard=2, expert=2),
    Mesh(shard=2, context=2, expert=2),
    Mesh(shard=4, expert=4),
    Mesh(context=2, tensor=2),
]


def test_torchs_device_mesh_has_the_same_groups(pool: Pool) -> None:
    flattened = [("shard", "context"), ("replicate", "shard", "context")]
    for mesh in TORCH_SHAPES:
        for rank, found in enumerate(pool.run(4, groups_of_torch, mesh, flattened)):
            place = place_of(rank, mesh)
            assert found["coordinates"] == {name: getattr(place, name) for name in DIMENSIONS}, (mesh, rank)
            assert found["expert"] == place.expert
            for names, ranks in found["groups"].items():
                assert ranks in groups(mesh, names), (mesh, rank, names)
                assert rank in ranks


def test_a_shape_of_another_size_is_refused_with_the_nearest_that_would_do():
    drawn = random.Random(4)
    for _ in range(300):
        ways = {name: drawn.choice([1, 1, 2, 3, 4, 8]) for name in DIMENSIONS}
        shards = ways["shard"] * ways["context"]
        mesh = Mesh(**ways, expert=drawn.choice([n for n in range(1, shards + 1) if shards % n == 0]))
        ranks = drawn.randint(1, 64)
        if ranks == mesh.world_size:
            mesh.check(ranks)
            continue
        with pytest.raises(InputError) as caught:
            mesh.check(ranks)
        assert f"is {mesh.world_size} ranks, but there are {ranks}" in caught.value.message
        near = mesh.nearest(ranks)
        assert 1 <= len(near) <= 3
        for other in near:
            other.check(ranks)
            assert other.flow() in (caught.value.hint or "")
        assert str(mesh.world_size) in (caught.value.hint or "")


def test_the_nearest_shape_changes_one_dimension_where_that_is_enough():
    assert Mesh(tensor=4, pipeline=4).nearest(32) == [
        Mesh(replicate=2, tensor=4, pipeline=4),
        Mesh(tensor=4, pipeline=8),
        Mesh(tensor=8, pipeline=4),
    ]
    assert Mesh(shard=8).nearest(6) == [Mesh(shard=6)]
    assert Mesh(tensor=4, pipeline=4).nearest(6) == [Mesh(tensor=2, replicate=3)]


def test_experts_that_do_not_fit_are_refused_with_numbers_that_would():
    with pytest.raises(InputError) as caught:
        Mesh(shard=4, context=2, expert=3).check(8)
    error = caught.value
    assert error.message == (
        "plan.mesh.expert: 3 does not divide shard 4 × context 2 = 8, whose ranks hold the experts"
    )
    assert error.hint == "use plan.mesh.expert=2, or plan.mesh.shard=6"
    assert error.details["allowed"] == "a divisor of 8"
    Mesh(shard=4, context=2, expert=2).check(8)
    Mesh(shard=6, context=2, expert=3).check(12)
