"""A world of 64 ranks on one machine: groups and parts of a model are those that the layout says."""

from __future__ import annotations

from typing import Any

import pytest
from fake_world_cases import part_of_rank
from pool import Pool

from gradus.parallel.layout import groups, place_of
from gradus.schema.recipe import Recipe

TENSOR, PIPELINE, SHARD = 8, 4, 2
LAYERS, WIDTH, VOCABULARY = 8, 64, 128
GPT = {"use": "gpt", "width": WIDTH, "heads": 8, "context": 32, "vocabulary": VOCABULARY, "tied": False}


def recipe_of(layers: int) -> Recipe:
    return Recipe.from_document(
        {
            "name": "64",
            "model": {**GPT, "layers": layers},
            "data": {"use": "synthetic-tokens"},
            "batch": 8,
            "steps": 1,
            "plan": {"mesh": {"tensor": TENSOR, "pipeline": PIPELINE, "shard": SHARD}, "zero": 3, "accumulate": 4},
        }
    )


RECIPE = recipe_of(LAYERS)
MESH = RECIPE.plan.mesh


@pytest.fixture(scope="module", params=[0, 13, 16, 37, 63])
def rank(pool: Pool, request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    return request.param, pool.run(1, part_of_rank, request.param, RECIPE)[0]


def test_torchs_groups_have_the_members_that_the_layout_says(rank: tuple[int, dict[str, Any]]) -> None:
    number, part = rank
    assert MESH.world_size == 64
    for names, members in part["groups"].items():
        (expected,) = [group for group in groups(MESH, names.split(", ")) if number in group]
        assert members == expected, names
    assert part["data"] == (place_of(number, MESH).shard, SHARD)


def test_a_rank_has_the_blocks_of_its_stage_and_no_memory_for_them_yet(rank: tuple[int, dict[str, Any]]) -> None:
    number, part = rank
    stage = place_of(number, MESH).pipeline
    each = LAYERS // PIPELINE
    mine = list(range(stage * each, (stage + 1) * each))
    assert part["blocks"] == [mine]
    assert part["on meta"]
    held = {name.split(".")[1] for name in part["whole"] if name.startswith("blocks.")}
    assert held == {str(block) for block in mine}
    assert ("embedding.token.weight" in part["whole"]) == (stage == 0)
    assert ("head.output.weight" in part["whole"]) == (stage == PIPELINE - 1)
    assert part["sharded apart"] == [f"blocks.{block}" for block in mine]


def test_a_stage_with_one_block_shards_it_by_itself_too(pool: Pool) -> None:
    """So that zero 3 lets go of it after its turn: by its stage alone nobody could tell that it is repeated."""
    (part,) = pool.run(1, part_of_rank, 16, recipe_of(layers=PIPELINE))
    assert part["blocks"] == [[1]]
    assert part["sharded apart"] == ["blocks.1"]


def test_a_rank_holds_its_slice_of_its_shard_of_each_parameter(rank: tuple[int, dict[str, Any]]) -> None:
    _, part = rank
    block = min(part["blocks"][0])
    wanted = {  # tensor divides rows or columns, and shard divides the rows that are left
        f"blocks.{block}.attention.qkv.weight": (3 * WIDTH // TENSOR // SHARD, WIDTH),
        f"blocks.{block}.attention.out.weight": (WIDTH // SHARD, WIDTH // TENSOR),
        f"blocks.{block}.mlp.up.weight": (4 * WIDTH // TENSOR // SHARD, WIDTH),
        f"blocks.{block}.mlp.down.weight": (WIDTH // SHARD, 4 * WIDTH // TENSOR),
        f"blocks.{block}.attention_norm.weight": (WIDTH // SHARD,),
        "embedding.token.weight": (VOCABULARY // TENSOR // SHARD, WIDTH),
        "head.output.weight": (VOCABULARY // TENSOR // SHARD, WIDTH),
    }
    found = {name: part["here"][name] for name in wanted if name in part["here"]}
    assert len(found) >= 5
    assert found == {name: wanted[name] for name in found}
    assert part["whole"][f"blocks.{block}.attention.qkv.weight"] == (3 * WIDTH, WIDTH), "names and shapes of the whole"
