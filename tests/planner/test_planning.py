"""Planning for a cluster that need not be at hand: how many GPUs, which nodes, and what lies where."""

from __future__ import annotations

import math
import shlex
from typing import Any

import pytest

import gradus
from gradus.planner.choice.search import gain_worth_it
from gradus.planner.defaults import default_plan
from gradus.planner.layout_table import MOST_LINES, layout_document, layout_lines, layout_text, layout_words
from gradus.planner.planning import plan_to_train, planned, site_for
from gradus.planner.prediction import Predictor
from gradus.planner.profile import request
from gradus.planner.resolve import resolved
from gradus.schema.cluster import Cluster, GpuNumbers, Links, Scheduler, Storage
from gradus.schema.errors import GradusError, InputError, NoPlanFits
from gradus.schema.intervals import seconds_of
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

LAPTOP = Cluster(name="laptop", cpu_cores=8, memory_gib=16)
GPU = GpuNumbers(name="NVIDIA H200", memory_gib=141, compute_capability=[9, 0])
LINKS = Links(intra="NVLink 4", inter="InfiniBand NDR", nics_per_node=8)
WIDE = {"use": "gpt", "layers": 8, "width": 1024, "heads": 8, "context": 1024}
SITE = Cluster(name="site", nodes=4, gpus_per_node=8, gpu=GPU, cpu_cores=64, memory_gib=512, links=LINKS)


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


def test_choices_have_a_plan_a_prediction_and_reasons():
    choices = gradus.plan(recipe(), SITE, gpus=16)
    best = choices[0]
    assert best.plan.mesh == Mesh(replicate=16)
    assert best.plan.precision == "bf16"
    assert best.reasons["mesh"].startswith("16 ranks, each with the whole model: ")
    assert best.prediction is not None
    assert best.prediction.verdict == "fits"
    assert best.prediction.limit_bytes == 141 * 2**30
    seconds = [choice.prediction.step.total for choice in choices]
    assert seconds[0] <= min(seconds) + gain_worth_it(min(seconds)), "simplicity is worth no more"
    assert all(choice.plan.mesh.world_size == 16 for choice in choices)
    assert len({str(choice.plan) for choice in choices}) == len(choices) > 1


def test_a_recipe_and_a_cluster_may_be_given_as_files_and_the_fewest_gpus_that_fit_are_taken(tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe().to_yaml())
    (tmp_path / "site.yaml").write_text(SITE.to_yaml())
    assert gradus.plan(tmp_path / "recipe.yaml", str(tmp_path / "site.yaml"))[0].plan.mesh == Mesh()


def test_on_the_machine_at_hand_all_gpus_work(monkeypatch):
    monkeypatch.setattr(Cluster, "detect", classmethod(lambda cls: SITE))
    assert gradus.plan(recipe())[0].plan.mesh == Mesh(replicate=32)
    shared = SITE.model_copy(update={"scheduler": Scheduler(kind="slurm")})
    monkeypatch.setattr(Cluster, "detect", classmethod(lambda cls: shared))
    assert gradus.plan(recipe())[0].plan.mesh == Mesh(), "a cluster that others use, too: the fewest that fit"


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
    for choice in gradus.plan(recipe(ranks_per_gpu=2), SITE, gpus=4):
        assert choice.plan.mesh.world_size == 8
        assert choice.prediction.limit_bytes == 141 * 2**30 // 2


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


# --- a run that starts


def untraceable(*_: object, **__: object) -> None:
    raise GradusError("the model could not be traced: it reads the stars")


def untouched(*_: object, **__: object) -> None:
    raise AssertionError("nothing is to be traced")


def test_a_run_on_gpus_gets_the_best_plan_and_keeps_what_is_fixed():
    choice, notes = plan_to_train(resolved(recipe(micro_batch=2)), SITE, 8)
    assert (choice.plan.mesh.world_size, choice.plan.micro_batch, notes) == (8, 2, [])
    assert choice.prediction is not None


def test_a_run_without_gpus_gets_the_plain_defaults_and_nothing_is_traced(monkeypatch):
    monkeypatch.setattr(request, "profiles_for", untouched)
    monkeypatch.setattr(Predictor, "trace", untouched)
    choice, notes = plan_to_train(resolved(recipe()), LAPTOP, 2)
    assert (choice, notes) == (default_plan(resolved(recipe()), LAPTOP, 2), [])


def test_a_model_that_cannot_be_traced_gets_the_plain_defaults_with_a_note(monkeypatch):
    monkeypatch.setattr(Predictor, "trace", untraceable)
    choice, [note] = plan_to_train(resolved(recipe()), SITE, 8)
    assert choice.plan.mesh == Mesh(replicate=8)
    assert "it reads the stars" in note
    found = planned(resolved(recipe()), SITE, 8)
    assert (found.choices[0].plan.mesh, found.notes) == (Mesh(replicate=8), [note])


SMALL = SITE.model_copy(update={"gpu": GpuNumbers(name="Small", memory_gib=0.3, compute_capability=[9, 0])})


def test_a_run_that_cannot_fit_is_refused_unless_the_recipe_says_all_of_it():
    with pytest.raises(NoPlanFits):
        plan_to_train(resolved(recipe()), SMALL, 1)
    told = recipe(mesh={"replicate": 1}, micro_batch=64, recompute="none")
    choice, [note] = plan_to_train(resolved(told), SMALL, 1)
    assert choice.plan.micro_batch == 64
    assert note.startswith("started as the recipe says, although no plan fits")


@pytest.mark.parametrize(("nproc", "fixed"), [(1, {}), (8, {"accumulate": 2})])
def test_a_refusal_to_start_says_how_to_start_all_the_same(tmp_path, nproc, fixed):
    (tmp_path / "recipe.yaml").write_text(recipe(**fixed).to_yaml())
    with pytest.raises(NoPlanFits) as caught:
        plan_to_train(resolved(Recipe.load(tmp_path / "recipe.yaml")), SMALL, nproc)
    typed = shlex.split(caught.value.hint.partition("to start it all the same: ")[2])
    assert typed[::2] == ["--set"] * (len(typed) // 2)
    told = Recipe.load(tmp_path / "recipe.yaml", tuple(typed[1::2]))
    choice, [note] = plan_to_train(resolved(told), SMALL, nproc)
    assert choice.plan.mesh.world_size == nproc
    assert note.startswith("started as the recipe says, although no plan fits")


def test_limits_hold_for_a_number_of_gpus_that_is_asked_for_too():
    long = Recipe.from_document(recipe().model_dump(exclude_unset=True) | {"steps": 1000})
    with pytest.raises(NoPlanFits, match=r"--deadline: the run takes .* on 8 GPUs; 1 seconds are allowed"):
        gradus.plan(long, SITE, gpus=8, deadline="1s")
    with pytest.raises(NoPlanFits, match=r"--gpu-hours: the run takes .* GPU-hours on 8 GPUs; 1e-06 GPU-hours"):
        gradus.plan(long, SITE, gpus=8, gpu_hours=1e-6)
    with pytest.raises(NoPlanFits, match="--deadline"):
        gradus.plan(recipe(mesh={"replicate": 8}), SITE, deadline="0.001s")
    kept = gradus.plan(long, SITE, gpus=8, deadline="10d")
    assert all(choice.prediction.budget.seconds <= 10 * 86400 for choice in kept)


def test_a_limit_that_nobody_can_keep_is_refused_with_the_cause():
    with pytest.raises(InputError, match="--deadline: laptop has no GPUs"):
        gradus.plan(recipe(), LAPTOP, gpus=2, deadline="1s")
    unknown = SITE.model_copy(update={"gpu": GpuNumbers(name="Mystery", memory_gib=80, compute_capability=[9, 0])})
    with pytest.raises(NoPlanFits, match="how fast Mystery of site is, is not known"):
        gradus.plan(recipe(), unknown, deadline="1d")


def test_nodes_of_gpus_on_a_cluster_without_any_are_refused_in_its_name():
    with pytest.raises(InputError, match="found 2x2, but laptop has no GPUs"):
        site_for(LAPTOP, "2x2")


def test_what_is_said_to_fit_when_nothing_does_is_planned_then():
    fixed = {"offload": "none", "activation_offload": False}
    told = Recipe.from_document(recipe(**fixed).model_dump(exclude_unset=True) | {"model": WIDE})
    tight = SITE.model_copy(update={"gpu": GpuNumbers(name="Small", memory_gib=2, compute_capability=[9, 0])})
    with pytest.raises(NoPlanFits) as caught:
        gradus.plan(told, tight, gpus=1)
    [more] = [change for change in caught.value.details["changes"] if "gpus" in change]
    assert gradus.plan(told, tight, gpus=more["gpus"])[0].prediction.verdict == "fits"


def test_by_default_as_many_gpus_work_as_can_share_the_batch():
    few = resolved(recipe().model_copy(update={"batch": 2}))
    choice, _ = plan_to_train(few, SITE, None)
    assert choice.plan.mesh.world_size == 2
    assert choice.reasons["mesh"].startswith("2 of 32 GPUs: batch 2 cannot be split evenly over 3 to 32 ranks; ")


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(InputError, match="33 ranks need a GPU each, but site has 32"):
        plan_to_train(resolved(recipe()), SITE, 33)


def test_a_checkpoint_interval_of_auto_is_left_to_the_run():
    failing = SITE.model_copy(update={"failures_per_node_day": 0.5})
    document = recipe().model_dump(exclude_unset=True) | {"checkpoint": {"every": "auto"}, "steps": 10_000_000}
    [choice, *_] = gradus.plan(Recipe.from_document(document), failing, gpus=8)
    assert choice.plan.checkpoint_every == "auto"
    assert choice.reasons["checkpoint_every"] == "the run decides, from the stall that it measures"
    budget = choice.prediction.budget
    assert 0 < budget.checkpoint_stall_seconds < budget.checkpoint_seconds < budget.checkpoint_every_seconds


def test_a_checkpoint_is_written_before_the_next_begins():
    document = recipe().model_dump(exclude_unset=True) | {"steps": 10_000_000}
    assert gradus.plan(Recipe.from_document(document), SITE, gpus=8)[0].plan.checkpoint_every == "10m"
    slow = SITE.model_copy(update={"storage": Storage(gb_per_second=0.00001)})
    [choice, *_] = gradus.plan(Recipe.from_document(document), slow, gpus=8)
    every, takes = seconds_of(choice.plan.checkpoint_every), choice.prediction.budget.checkpoint_seconds
    assert every == math.ceil(takes) > 600
    assert choice.reasons["checkpoint_every"].startswith("no more often: a checkpoint takes ")
    assert gradus.plan(recipe(checkpoint_every=7), slow, gpus=8)[0].plan.checkpoint_every == 7


def test_a_deadline_finds_the_number_of_gpus():
    long = Recipe.from_document(recipe().model_dump(exclude_unset=True) | {"steps": 1_000_000, "model": WIDE})
    alone = gradus.plan(long, SITE, gpus=1)[0].prediction.budget.seconds
    [choice, *_] = gradus.plan(long, SITE, deadline=f"{round(alone / 1.5)}s")
    assert choice.plan.mesh.world_size > 1
    assert choice.prediction.budget.seconds <= alone / 1.5
    with pytest.raises(NoPlanFits, match="--deadline"):
        gradus.plan(long, SITE, deadline="1s")


def test_a_number_of_gpus_is_judged_by_the_plans_that_are_answered_for_it():
    """With the loss in parts, steps are predicted to take longer, and two GPUs are too slow: four are not."""
    words = {"use": "gpt", "layers": 6, "width": 512, "heads": 8, "context": 512, "vocabulary": 50304}
    changes = {"steps": 100_000, "model": words, "batch": 128}
    long = Recipe.from_document(recipe().model_dump(exclude_unset=True) | changes)
    on_two = gradus.plan(long, SITE, gpus=2)
    assert on_two[0].plan.loss_chunks > 1
    fastest = min(choice.prediction.budget.seconds for choice in on_two)
    assert gradus.plan(long, SITE, deadline=f"{math.ceil(fastest)}s")[0].plan.mesh.world_size == 2
    allowed = round(0.99 * fastest)
    choices = gradus.plan(long, SITE, deadline=f"{allowed}s")
    assert choices[0].plan.mesh.world_size == 4
    assert all(choice.prediction.budget.seconds <= allowed for choice in choices)
