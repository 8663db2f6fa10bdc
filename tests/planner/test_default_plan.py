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


def test_a_precision_that_is_only_assumed_says_so():
    assert "assumed" in default_plan(recipe(), gpus(1, None, name="Own GPU 9"), 1).reasons["precision"]
    assert "assumed" not in default_plan(recipe(), gpus(1, [8, 0], name="Own GPU 9"), 1).reasons["precision"]


@pytest.mark.parametrize(
    ("plan", "ranks", "field"),
    [
        ({"mesh": {"tensor": 2}}, 2, "plan.mesh.tensor"),
        ({"mesh": {"pipeline": 2}}, 2, "plan.mesh.pipeline"),
        ({"mesh": {"context": 2}}, 2, "plan.mesh.context"),
        ({"mesh": {"shard": 2}, "zero": 1}, 2, "plan.mesh.shard"),
        ({"recompute": "full"}, 1, "plan.recompute"),
        ({"offload": "cpu"}, 1, "plan.offload"),
        ({"precision": "fp8"}, 1, "plan.precision"),
    ],
)
def test_what_this_version_cannot_do_is_refused(plan, ranks, field):
    assert refusal(recipe(plan=plan), CPU, ranks).details["field"] == field


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
        ("gpt", gpus(1, [8, 0]), {}, False),
        ("own.py:Net", gpus(1, [8, 0]), {}, False),
        ("own.py:Net", gpus(1, [8, 0]), {"channels_last": True}, True),
    ],
)
def test_only_reference_models_of_images_get_channels_last_unasked(model, cluster, plan, channels_last):
    choice = default_plan(recipe(plan=plan, model={"use": model}, **IMAGES), cluster, 1)
    assert choice.plan.channels_last == channels_last
    assert choice.reasons["channels_last"]


def test_the_checkpoint_interval_is_the_recipes():
    assert default_plan(recipe(checkpoint={"every": 5}), CPU, 1).plan.checkpoint_every == 5
    assert default_plan(recipe(checkpoint={"every": "auto"}), CPU, 1).plan.checkpoint_every == "10m"
    assert default_plan(recipe(plan={"checkpoint_every": "90s"}), CPU, 1).plan.checkpoint_every == "90s"


def test_a_refusal_names_the_file_or_the_override_that_the_field_is_in(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe(7).to_yaml())
    assert refusal(Recipe.load(path), CPU, 2).details["file"] == str(path)
    assert refusal(Recipe.load(path, ["batch=9"]), CPU, 2).message.startswith("--set batch=9: batch: 9 samples")
