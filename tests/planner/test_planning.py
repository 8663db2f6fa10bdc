"""Planning for a cluster that need not be at hand: how many GPUs, which nodes, and what lies where."""

from __future__ import annotations

from typing import Any

import pytest

import gradus
from gradus.planner.layout_table import MOST_LINES, layout_document, layout_lines, layout_text, layout_words
from gradus.planner.planning import site_for
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

LAPTOP = Cluster(name="laptop", cpu_cores=8, memory_gib=16)
GPU = GpuNumbers(name="NVIDIA H200", memory_gib=141, compute_capability=[9, 0])
SITE = Cluster(name="site", nodes=4, gpus_per_node=8, gpu=GPU, cpu_cores=64, memory_gib=512)


def recipe(**plan: Any) -> Recipe:
    return Recipe.from_document(
        {
            "name": "tiny",
            "model": {"use": "gpt"},
            "data": {"use": "synthetic-tokens"},
            "batch": 64,
            "steps": 3,
            "optimizer": {"lr": 0.1},
            "plan": plan,
        }
    )


def test_choices_have_a_plan_and_reasons():
    [choice] = gradus.plan(recipe(), SITE, gpus=16)
    assert choice.plan.mesh == Mesh(replicate=16)
    assert choice.plan.precision == "bf16"
    assert choice.reasons["mesh"] == "16 ranks, each with the whole model"


def test_a_recipe_and_a_cluster_may_be_given_as_files(tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe().to_yaml())
    (tmp_path / "site.yaml").write_text(SITE.to_yaml())
    [choice] = gradus.plan(tmp_path / "recipe.yaml", str(tmp_path / "site.yaml"))
    assert choice.plan.mesh == Mesh(replicate=32)


def test_what_a_recipe_leaves_open_is_resolved_first():
    with pytest.raises(InputError, match="model: missing"):
        gradus.plan(recipe().model_copy(update={"model": type(recipe().model)()}), LAPTOP)


@pytest.mark.parametrize(
    ("cluster", "gpus", "nodes", "per_node", "count"),
    [
        (SITE, None, 4, 8, None),
        (SITE, 16, 4, 8, 16),
        (SITE, "2x8", 2, 8, 16),
        (SITE, "4 × 4", 4, 4, 16),
        (LAPTOP, 32, 1, 0, 32),
    ],
)
def test_gpus_are_a_number_or_nodes_of_so_many(cluster, gpus, nodes, per_node, count):
    site, found = site_for(cluster, gpus)
    assert (site.nodes, site.gpus_per_node, found) == (nodes, per_node, count)


@pytest.mark.parametrize("gpus", ["0", "x8", "4x", "4x0", "-1", "many", "2.5"])
def test_anything_else_is_refused(gpus):
    with pytest.raises(InputError, match="32, or nodes and GPUs on each such as 4x8") as caught:
        site_for(SITE, gpus)
    assert (caught.value.details["field"], caught.value.details["found"]) == ("--gpus", gpus)


@pytest.mark.parametrize("gpus", [33, "8x8", "2x16"])
def test_more_than_the_cluster_has_is_refused_with_what_it_has(gpus):
    with pytest.raises(InputError, match="site has 4 nodes of 8 GPUs") as caught:
        site_for(SITE, gpus)
    assert caught.value.details["allowed"] == "at most 4x8"


def test_without_a_cluster_file_gpus_that_are_not_here_can_be_described(monkeypatch):
    monkeypatch.setattr(Cluster, "detect", classmethod(lambda cls: LAPTOP))
    site, count = site_for(None, "4x8")
    assert (site.nodes, site.gpus_per_node, count) == (4, 8, 32)
    [choice] = gradus.plan(recipe(mesh={"tensor": 4, "pipeline": 4, "replicate": 2}), gpus="4x8")
    assert choice.plan.mesh.world_size == 32
    [choice] = gradus.plan(recipe(mesh={"shard": 16}))
    assert choice.plan.mesh.world_size == 16, "the CPU takes any number of ranks"


def test_gpus_that_ranks_share_count_once():
    [choice] = gradus.plan(recipe(ranks_per_gpu=2), SITE, gpus=4)
    assert choice.plan.mesh == Mesh(replicate=8)


def test_the_published_layout_is_shown_and_said():
    text = layout_text(Plan(mesh=Mesh(tensor=4, pipeline=4, replicate=2)), 8)
    assert text == (
        "node  ranks  replica  stage  tensor\n"
        "0     0-3    0        0      0-3\n"
        "0     4-7    0        1      0-3\n"
        "1     8-11   0        2      0-3\n"
        "1     12-15  0        3      0-3\n"
        "2     16-19  1        0      0-3\n"
        "2     20-23  1        1      0-3\n"
        "3     24-27  1        2      0-3\n"
        "3     28-31  1        3      0-3\n"
        "\n"
        "32 ranks on 4 nodes of 8: replicate 2 × pipeline 4 × tensor 4.\n"
        "Two stages per node.\n"
        "No tensor group across nodes.\n"
        "Pipeline groups of 4 ranks reach across 2 nodes.\n"
        "Replicate groups of 2 ranks reach across 2 nodes."
    )


@pytest.mark.parametrize(
    ("plan", "per_node", "words"),
    [
        (Plan(mesh=Mesh(tensor=16)), 8, ["Tensor groups of 16 ranks reach across 2 nodes."]),
        (Plan(mesh=Mesh(context=2, tensor=4)), 8, ["No tensor group across nodes.", "No context group across nodes."]),
        (Plan(mesh=Mesh(shard=2, tensor=6)), 8, ["Tensor groups of 6 ranks reach across 2 nodes."]),
        (Plan(mesh=Mesh(pipeline=3, tensor=4)), 8, ["1 to 2 stages per node."]),
        (Plan(mesh=Mesh(pipeline=2, tensor=4), stages_per_rank=2), 4, ["Two stages per node, 2 on each rank."]),
        (Plan(mesh=Mesh(pipeline=2, tensor=8)), 8, ["One stage per node.", "No tensor group across nodes."]),
        (Plan(mesh=Mesh(shard=16, expert=8), zero=1), 8, ["No expert group across nodes."]),
        (Plan(mesh=Mesh(shard=16, expert=16), zero=1), 8, ["Expert groups of 16 ranks reach across 2 nodes."]),
        (Plan(), 1, ["1 rank on one node: 1 rank."]),
    ],
)
def test_which_groups_cross_a_node_is_said_in_words(plan, per_node, words):
    said = layout_words(plan, per_node)
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("mesh", "per_node"),
    [
        (Mesh(replicate=2, pipeline=2, shard=2, context=2, tensor=2, expert=4), 8),
        (Mesh(shard=3, tensor=4), 8),
        (Mesh(pipeline=2, shard=5, context=3), 4),
        (Mesh(replicate=7), 4),
        (Mesh(shard=6, context=2, expert=4), 5),
    ],
)
def test_each_line_holds_all_combinations_of_its_numbers_and_every_rank_has_one_line(mesh, per_node):
    from gradus.parallel.layout import DIMENSIONS, place_of

    ranks = []
    for line in layout_lines(mesh, per_node):
        assert {rank // per_node for rank in line.ranks} == {line.node}
        combinations = 1
        for name in DIMENSIONS:
            combinations *= len(line.numbers[name])
        assert combinations == len(line.ranks)
        for rank in line.ranks:
            place = place_of(rank, mesh)
            assert all(getattr(place, name) in numbers for name, numbers in line.numbers.items())
        ranks += line.ranks
    assert ranks == list(range(mesh.world_size))


def test_ranks_with_several_stages_show_them_all():
    text = layout_text(Plan(mesh=Mesh(pipeline=2, tensor=2), stages_per_rank=2), 2)
    assert "0     0-1    0,2    0-1" in text
    assert "1     2-3    1,3    0-1" in text


@pytest.mark.parametrize(
    ("mesh", "note"),
    [
        (Mesh(replicate=64, pipeline=4, tensor=8), "Nodes 4-255 and replicas 1-63 repeat nodes 0-3."),
        (Mesh(replicate=512, tensor=4), "Nodes 1-255 and replicas 2-511 repeat node 0."),
        (Mesh(replicate=2048), "Nodes 1-255 and replicas 8-2047 repeat node 0."),
        (Mesh(shard=2048), "232 lines like these are left out; --json has all."),
    ],
)
def test_a_large_world_is_folded_and_says_so(mesh, note):
    plan = Plan(mesh=mesh)
    text = layout_text(plan, 8)
    assert note in text
    assert len(text.splitlines()) < MOST_LINES + 12
    assert sum(len(line["ranks"]) for line in layout_document(plan, 8)["lines"]) == 2048
