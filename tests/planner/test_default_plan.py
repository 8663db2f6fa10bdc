"""The default plan keeps what the recipe fixes, cuts the batch, and refuses what cannot be before anything starts."""

from typing import Any

import pytest

from gradus.planner.defaults import default_plan, default_world_size
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh
from gradus.schema.recipe import Recipe

CPU = Cluster(name="laptop", cpu_cores=8, memory_gib=16)


def gpus(count: int, capability: list[int] | None, name: str = "Some GPU", nodes: int = 1) -> Cluster:
    gpu = GpuNumbers(name=name, memory_gib=16, compute_capability=capability)
    return Cluster(name="box", nodes=nodes, gpus_per_node=count, gpu=gpu, cpu_cores=32, memory_gib=256)


def recipe(batch: int = 12, plan: dict[str, Any] | None = None, **more: Any) -> Recipe:
    return Recipe.from_document(
        {
            "name": "tiny",
            "model": {"use": "gpt"},
            "data": {"use": "synthetic-tokens"},
            "batch": batch,
            "steps": 3,
            "optimizer": {"lr": 0.1},
            "plan": plan or {},
            **more,
        }
    )


def refusal(of: Recipe, cluster: Cluster, ranks: int) -> InputError:
    with pytest.raises(InputError) as caught:
        default_plan(of, cluster, ranks)
    assert {"field", "found", "allowed"} <= caught.value.details.keys()
    return caught.value


@pytest.mark.parametrize(
    ("batch", "ranks", "plan", "micro_batch", "accumulate"),
    [
        (12, 1, {}, 12, 1),
        (12, 3, {}, 4, 1),
        (12, 2, {"accumulate": 3}, 2, 3),
        (12, 2, {"micro_batch": 2}, 2, 3),
        (12, 4, {"micro_batch": 3}, 3, 1),
    ],
)
def test_the_batch_is_the_product_on_any_number_of_ranks(batch, ranks, plan, micro_batch, accumulate):
    chosen = default_plan(recipe(batch, plan), CPU, ranks).plan
    assert (chosen.micro_batch, chosen.accumulate, chosen.mesh) == (micro_batch, accumulate, Mesh(replicate=ranks))
    assert chosen.micro_batch * chosen.accumulate * ranks == batch


def test_what_the_recipe_fixes_is_kept_and_said_so():
    fixed = {"micro_batch": 3, "precision": "fp64", "workers": 1, "bucket_mib": 3, "compile": True, "mesh": {}}
    choice = default_plan(recipe(plan=fixed), gpus(1, [9, 0]), 1)
    for name, value in fixed.items():
        assert getattr(choice.plan, name) == (value or Mesh())
        assert choice.reasons[name] == "fixed by the recipe"
    assert "fixed" not in choice.reasons["accumulate"]


def test_every_choice_has_a_reason():
    choice = default_plan(recipe(), CPU, 2)
    assert {"mesh", "micro_batch", "accumulate", "precision", "compile", "workers", "checkpoint_every"} <= set(
        choice.reasons
    )


@pytest.mark.parametrize(
    ("batch", "ranks", "plan", "numbers", "works"),
    [
        (7, 2, {}, ["7", "2 ranks"], [6, 8]),
        (2, 3, {}, ["2", "3 ranks"], [3]),
        (8, 1, {"micro_batch": 3}, ["8", "micro_batch 3"], [6]),
        (8, 2, {"accumulate": 3}, ["8", "accumulate 3"], [6]),
        (8, 2, {"micro_batch": 8}, ["8", "micro_batch 8"], [16]),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused_with_the_numbers_and_one_that_works(
    batch, ranks, plan, numbers, works
):
    error = refusal(recipe(batch, plan), CPU, ranks)
    assert error.details["field"] == "batch"
    for number in numbers:
        assert number in error.message
    for other in works:
        assert str(other) in (error.hint or "")
        default_plan(recipe(other, plan), CPU, ranks)


def test_more_ranks_than_gpus_are_refused():
    error = refusal(recipe(), gpus(2, [8, 0]), 3)
    assert (error.details["field"], error.details["found"], error.details["allowed"]) == ("--nproc", 3, 2)
    assert "CUDA_VISIBLE_DEVICES" in (error.hint or "")
    default_plan(recipe(), gpus(2, [8, 0], nodes=2), 4)


@pytest.mark.parametrize(
    ("cluster", "precision"),
    [
        (CPU, "fp32"),
        (gpus(1, [7, 0]), "fp16"),
        (gpus(1, [7, 5]), "fp16"),
        (gpus(1, [8, 0]), "bf16"),
        (gpus(1, [9, 0]), "bf16"),
        (gpus(1, [10, 0]), "bf16"),
        (gpus(1, [12, 1]), "bf16"),
        (gpus(1, None, name="NVIDIA H200"), "bf16"),
        (Cluster(name="v", gpus_per_node=1, gpu="Tesla V100-SXM2-32GB", cpu_cores=4, memory_gib=9), "fp16"),
    ],
)
def test_precision_follows_from_what_the_gpu_can_do(cluster, precision):
    choice = default_plan(recipe(), cluster, 1)
    assert choice.plan.precision == precision
    assert choice.plan.compile == (cluster.gpus_per_node > 0)


def test_where_fp16_would_be_refused_it_is_not_chosen():
    choice = default_plan(recipe(16, {"mesh": {"pipeline": 2}}), gpus(2, [7, 0]))
    assert choice.plan.precision == "fp32"
    assert "pipeline cannot scale the loss" in choice.reasons["precision"]


def test_a_precision_that_is_only_assumed_says_so():
    assert "assumed" in default_plan(recipe(), gpus(1, None, name="Own GPU 9"), 1).reasons["precision"]
    assert "assumed" not in default_plan(recipe(), gpus(1, [8, 0], name="Own GPU 9"), 1).reasons["precision"]


@pytest.mark.parametrize(
    ("mesh", "zero", "reason"),
    [
        ({"replicate": 2}, 0, "mesh.shard is 1"),
        ({"shard": 2}, 3, "the least memory"),
        ({"replicate": 2, "shard": 2}, 3, "the least memory"),
        ({"shard": 2, "pipeline": 2}, 1, "a pipeline reduces gradients once"),
    ],
)
def test_who_shards_without_saying_what_gets_the_stage_that_suits(mesh, zero, reason):
    choice = default_plan(recipe(16, {"mesh": mesh}), CPU)
    assert choice.plan.zero == zero
    assert reason in choice.reasons["zero"]


def test_who_says_only_zero_gets_a_mesh_that_shards():
    choice = default_plan(recipe(plan={"zero": 2}), CPU, 4)
    assert (choice.plan.mesh, choice.plan.zero) == (Mesh(shard=4), 2)
    assert "zero 2 divides" in choice.reasons["mesh"]
    assert choice.reasons["zero"] == "fixed by the recipe"
    assert "more ranks" in (refusal(recipe(plan={"zero": 2}), CPU, 1).hint or "")


@pytest.mark.parametrize(
    ("batch", "plan", "micro_batch", "accumulate"),
    [
        (64, {}, 4, 16),  # four for each of four stages, and no more than that: matrices stay large
        (512, {}, 32, 16),
        (8, {}, 1, 8),  # fewer than that where the batch has no more
        (12, {}, 1, 12),
        (6, {}, 1, 6),  # no multiple of the stages divides it, but 1f1b needs none
        (64, {"accumulate": 8}, 8, 8),
        (64, {"micro_batch": 8}, 8, 8),
        (64, {"pipeline_schedule": "gpipe"}, 4, 16),
        (36, {"pipeline_schedule": "interleaved"}, 1, 36),
        (10, {"pipeline_schedule": "interleaved"}, 1, 10),  # two rounds of five
        (64, {"pipeline_schedule": "zero-bubble"}, 4, 16),
    ],
)
def test_a_pipeline_gets_enough_micro_batches(batch, plan, micro_batch, accumulate):
    model = {"use": "gpt", "layers": 8}
    choice = default_plan(recipe(batch, {"mesh": {"pipeline": 4}, **plan}, model=model), CPU)
    assert (choice.plan.micro_batch, choice.plan.accumulate) == (micro_batch, accumulate)
    if not {"accumulate", "micro_batch"} & plan.keys():
        assert f"{accumulate} micro-batches for 4 stages: a rank idles for" in choice.reasons["accumulate"]


def test_interleaved_gets_two_stages_on_each_rank_for_which_there_must_be_blocks():
    plan = {"mesh": {"pipeline": 4}, "pipeline_schedule": "interleaved"}
    choice = default_plan(recipe(16, plan, model={"use": "gpt", "layers": 8}), CPU)
    assert choice.plan.stages_per_rank == 2
    assert "two stages on each rank" in choice.reasons["stages_per_rank"]
    error = refusal(recipe(16, plan, model={"use": "gpt", "layers": 4}), CPU, 4)
    assert "= 8 stages, but the model has 4 blocks" in error.message
    assert error.hint == "use plan.mesh.pipeline=2"
    assert "pipeline_schedule" not in default_plan(recipe(), CPU, 1).reasons


def test_what_zero_bubble_cannot_take_is_left_out_unasked():
    plan = {"mesh": {"pipeline": 2}, "pipeline_schedule": "zero-bubble"}
    choice = default_plan(recipe(16, plan), gpus(2, [9, 0]))
    assert not choice.plan.compile
    assert "takes backward apart" in choice.reasons["compile"]
    assert default_plan(recipe(16, {"mesh": {"pipeline": 2}}), gpus(2, [9, 0])).plan.compile


def test_ranks_may_share_gpus_if_the_recipe_says_so():
    two = gpus(2, [9, 0])
    assert default_plan(recipe(plan={"ranks_per_gpu": 2}), two).plan.mesh == Mesh(replicate=4)
    assert default_plan(recipe(plan={"ranks_per_gpu": 2}), two, 4).plan.mesh.world_size == 4
    assert default_plan(recipe(plan={"ranks_per_gpu": 2, "mesh": {"shard": 3}}), two).plan.zero == 3
    error = refusal(recipe(plan={"ranks_per_gpu": 2}), two, 6)
    assert "6 ranks need GPUs, but box has 2, which take 4 with plan.ranks_per_gpu 2" in error.message
    assert "plan.ranks_per_gpu=3" in (error.hint or "")
    assert default_plan(recipe(10, {"ranks_per_gpu": 4}), two).reasons["mesh"] == (
        "5 of 8 places on GPUs (4 on each): batch 10 cannot be split evenly over 6 to 8 ranks"
    )


def test_a_mesh_that_needs_more_gpus_than_there_are_is_refused_with_one_that_does_not():
    with pytest.raises(InputError) as caught:
        default_plan(recipe(16, {"mesh": {"tensor": 2, "shard": 4}}), gpus(4, [9, 0]))
    assert caught.value.details["field"] == "plan.mesh"
    assert "8 ranks need a GPU each, but box has 4" in caught.value.message
    assert "for 4 ranks: plan.mesh={shard: 2, tensor: 2}" in (caught.value.hint or "")


def test_workers_share_the_cores_of_the_nodes_that_are_used():
    many = gpus(4, [9, 0], nodes=64)  # 32 cores on each
    assert "8 cores for each rank" in default_plan(recipe(16, {"mesh": {"replicate": 8}}), many).reasons["workers"]
    assert "32 cores for each rank" in default_plan(recipe(16, {"mesh": {"replicate": 1}}), many).reasons["workers"]


def test_a_mesh_of_another_size_than_the_ranks_is_refused_before_the_batch_is_blamed():
    error = refusal(recipe(6, {"mesh": {"replicate": 4}}), CPU, 2)
    assert error.details["field"] == "plan.mesh"
    assert "--nproc 4" in (error.hint or "")


def test_the_number_of_ranks_is_the_mesh_else_the_gpus_else_one():
    assert default_world_size(recipe(), CPU) == 1
    assert default_world_size(recipe(16), gpus(4, [8, 0], nodes=2)) == 8
    assert default_world_size(recipe(plan={"mesh": {"replicate": 3}}), gpus(4, [8, 0])) == 3


@pytest.mark.parametrize(
    ("count", "batch", "plan", "ranks", "reason"),
    [
        (1, 32, {}, 1, "one rank"),
        (3, 32, {}, 2, "2 of 3 GPUs: batch 32 cannot be split evenly over 3 ranks"),
        (4, 32, {}, 4, "4 ranks, each with the whole model"),
        (5, 32, {}, 4, "4 of 5 GPUs: batch 32 cannot be split evenly over 5 ranks"),
        (6, 32, {}, 4, "4 of 6 GPUs: batch 32 cannot be split evenly over 5 or 6 ranks"),
        (7, 32, {}, 4, "4 of 7 GPUs: batch 32 cannot be split evenly over 5 to 7 ranks"),
        (8, 3, {}, 3, "3 of 8 GPUs: batch 3 cannot be split evenly over 4 to 8 ranks"),
        (8, 32, {"micro_batch": 8}, 4, "4 of 8 GPUs: batch 32, micro_batch 8 cannot be split evenly over 5 to 8 ranks"),
        (2, 32, {"micro_batch": 16, "accumulate": 2}, 1, None),
    ],
)
def test_by_default_as_many_gpus_work_as_can_share_the_batch(count, batch, plan, ranks, reason):
    choice = default_plan(recipe(batch, plan), gpus(count, [8, 0]))
    assert choice.plan.mesh == Mesh(replicate=ranks)
    assert reason in (None, choice.reasons["mesh"])


def test_a_number_of_ranks_that_somebody_asked_for_is_not_changed():
    assert refusal(recipe(32), gpus(6, [8, 0]), 6).details["field"] == "batch"
    assert default_plan(recipe(32), gpus(6, [8, 0]), 4).reasons["mesh"] == "4 ranks, each with the whole model"
    with pytest.raises(InputError, match="batch"):
        default_plan(recipe(32, {"mesh": {"replicate": 6}}), gpus(6, [8, 0]))


IMAGES = {"data": {"use": "synthetic-images"}}


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "channels_last"),
    [
        ("resnet18", gpus(1, [8, 0]), {}, True),
        ("vit", gpus(1, [7, 0]), {}, True),
        ("simple-cnn", gpus(1, [8, 0]), {"precision": "tf32"}, True),
        ("simple-cnn", gpus(1, [8, 0]), {"precision": "fp32"}, False),
        ("resnet18", CPU, {}, False),
        ("resnet18", gpus(2, [8, 0]), {"mesh": {"shard": 2}}, False),
        ("vit", gpus(4, [8, 0]), {"mesh": {"tensor": 3}}, True),
        ("gpt", gpus(1, [8, 0]), {}, False),
        ("own.py:Net", gpus(1, [8, 0]), {}, False),
        ("own.py:Net", gpus(1, [8, 0]), {"channels_last": True}, True),
    ],
)
def test_only_reference_models_of_images_get_channels_last_unasked(model, cluster, plan, channels_last):
    choice = default_plan(recipe(plan=plan, model={"use": model}, **IMAGES), cluster, None if plan else 1)
    assert choice.plan.channels_last == channels_last
    assert choice.reasons["channels_last"]


@pytest.mark.parametrize(("batch", "nearest"), [(16, "32"), (40, "32 or 64")])
def test_a_batch_that_cannot_be_split_has_the_nearest_that_can(batch, nearest):
    hint = refusal(recipe(batch), gpus(32, [8, 0]), 32).hint
    assert (
        hint == f"use batch {nearest} (a run that goes on keeps its batch), or a number of ranks that divides {batch}"
    )


@pytest.mark.parametrize(
    ("cluster", "plan", "model", "narrow", "why"),
    [
        (gpus(1, [9, 0]), {}, "gpt", True, "layers add up in 16 bits"),
        (gpus(1, [9, 0]), {"precision": "fp8"}, "gpt", True, "layers add up in 16 bits"),
        (gpus(4, [9, 0]), {"mesh": {}}, "gpt", True, "layers add up in 16 bits"),
        (CPU, {"precision": "bf16"}, "gpt", False, "a GPU's memory"),
        (gpus(1, [7, 0]), {}, "gpt", False, "fp16"),
        (gpus(1, [9, 0]), {"precision": "fp32"}, "gpt", False, "fp32"),
        (gpus(2, [9, 0]), {"mesh": {"replicate": 2}}, "gpt", False, "gradients of replicas"),
        (gpus(2, [9, 0]), {"mesh": {"shard": 2}}, "gpt", False, "gathered in 16 bits anyway"),
        (gpus(1, [9, 0]), {}, "own.py:Net", False, "not traced"),
        (gpus(1, [9, 0]), {}, "own", True, "for your model's calls"),
        (gpus(1, [9, 0]), {"narrow_weights": True}, "own", True, "fixed by the recipe"),
        (gpus(1, [9, 0]), {"narrow_weights": False}, "gpt", False, "fixed by the recipe"),
    ],
)
def test_one_gpu_computes_with_weights_in_16_bits_where_the_model_is_known_to_take_them(
    cluster, plan, model, narrow, why
):
    choice = default_plan(recipe(plan=plan, model={"use": model}), cluster)
    assert choice.plan.narrow_weights == narrow
    assert why in choice.reasons["narrow_weights"]


def test_without_a_prediction_no_step_is_recorded_and_no_loss_taken_apart():
    chosen = default_plan(recipe(4096), gpus(1, [9, 0])).plan
    assert (chosen.cuda_graph, chosen.loss_chunks) == (False, 1)


def test_the_checkpoint_interval_is_the_recipes():
    assert default_plan(recipe(checkpoint={"every": 5}), CPU, 1).plan.checkpoint_every == 5
    left = default_plan(recipe(checkpoint={"every": "auto"}), CPU, 1)
    assert left.plan.checkpoint_every == "auto", "the run decides"
    assert left.reasons["checkpoint_every"] == "the run decides, from the stall that it measures"
    assert default_plan(recipe(plan={"checkpoint_every": "auto"}), CPU, 1).plan.checkpoint_every == "auto"
    assert default_plan(recipe(), CPU, 1).plan.checkpoint_every == "10m"
    assert default_plan(recipe(plan={"checkpoint_every": "90s"}), CPU, 1).plan.checkpoint_every == "90s"


def test_a_refusal_names_the_file_or_the_override_that_the_field_is_in(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe(7).to_yaml())
    assert refusal(Recipe.load(path), CPU, 2).details["file"] == str(path)
    assert refusal(Recipe.load(path, ["batch=9"]), CPU, 2).message.startswith("--set batch=9: batch: 9 samples")
