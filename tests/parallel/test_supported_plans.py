"""What works is not refused."""

from __future__ import annotations

import pytest
from configurations import CONFIGURATIONS, Configuration
from refusal_cases import CPU, GPT, H100, HUGGINGFACE, IMAGES, LATENT, MIXTURE, OWN, PARTS, RESNET, gpus, recipe

from gradus.planner.defaults import default_plan
from gradus.schema.recipe import Recipe


# Each is close to something that is refused.
@pytest.mark.parametrize(
    ("plan", "more", "cluster"),
    [
        ({}, {}, CPU),
        ({"mesh": {"tensor": 4, "pipeline": 4, "replicate": 2}}, {}, CPU),
        ({"mesh": {"tensor": 2}}, {**OWN, "tensor_plan": {"*.q": "colwise", "*.out": "rowwise"}}, CPU),
        ({"mesh": {"tensor": 2}}, HUGGINGFACE, CPU),
        (
            {"mesh": {"tensor": 2}, "sequence_parallel": False},
            {"data": {"use": "synthetic-tokens", "context": 31}},
            CPU,
        ),
        ({"mesh": {"tensor": 2}}, {"model": {**GPT, "context": 31}}, CPU),
        ({"mesh": {"tensor": 3}}, {"model": {"use": "vit"}, **IMAGES}, CPU),
        ({"mesh": {"shard": 2}}, {"lora": {"rank": 2}}, CPU),
        ({"mesh": {"context": 2, "shard": 2}}, {"model": {**GPT, "use": "bert"}}, CPU),
        ({"mesh": {"context": 2}, "context_attention": "ring"}, {}, H100),
        ({"mesh": {"context": 2}}, OWN, CPU),
        ({"mesh": {"context": 2}}, {"loss": "cross-entropy"}, CPU),
        ({"mesh": {"context": 2}}, {"loss": "own.py:loss"}, CPU),
        ({"mesh": {"shard": 2}}, {"loss": "torch.nn:CrossEntropyLoss"}, CPU),
        ({"mesh": {"pipeline": 2}}, {**OWN, **PARTS, "loss": "cross-entropy"}, CPU),
        ({"mesh": {"pipeline": 4}, "pipeline_schedule": "gpipe", "accumulate": 2}, {}, CPU),
        ({"mesh": {"pipeline": 2}, "pipeline_schedule": "interleaved", "accumulate": 1}, {}, CPU),
        ({"mesh": {"pipeline": 2}, "stage_blocks": [3, 1]}, {}, CPU),
        ({"mesh": {"pipeline": 2}, "pipeline_schedule": "zero-bubble", "recompute": "full"}, {}, CPU),
        ({"mesh": {"pipeline": 2}, "recompute": "selective"}, {}, CPU),
        ({"mesh": {"context": 2}}, {"model": LATENT}, H100),
        ({"mesh": {"pipeline": 2}, "compile": True}, {}, H100),
        ({"pipeline_schedule": "zero-bubble", "compile": True}, {}, H100),
        ({"mesh": {"pipeline": 2, "shard": 2}, "zero": 2}, {}, CPU),
        ({"mesh": {"shard": 2, "context": 2, "expert": 2}}, {"model": MIXTURE}, CPU),
        ({"mesh": {"replicate": 2}}, {"model": {**MIXTURE, "capacity_factor": 1.5}}, CPU),
        ({"mesh": {"pipeline": 2}}, {"model": {**MIXTURE, "balance": "bias"}}, CPU),
        ({"mesh": {"shard": 2}, "offload": "cpu", "zero": 1}, {}, CPU),
        ({"mesh": {"replicate": 4}, "synchronise_every": 4}, {}, CPU),
        ({"mesh": {"replicate": 4}, "compression": "bf16"}, {}, CPU),
        ({"mesh": {"shard": 2}, "compression": "bf16"}, {}, CPU),
        ({"recompute": "full", "activation_offload": True}, {"model": {"use": "mnist-cnn"}, **IMAGES}, CPU),
        ({"mesh": {"shard": 4}, "zero": 3}, RESNET, CPU),
        ({"precision": "fp8"}, {}, H100),
        ({"precision": "fp8", "fp8_scaling": "mx"}, {}, gpus(10, 0)),
        ({"mesh": {"shard": 16}, "ranks_per_gpu": 2}, {}, H100),
        ({"mesh": {"pipeline": 2}, "ranks_per_gpu": 2}, {}, CPU),
    ],
)
def test_what_can_be_combined_is_not_refused(plan, more, cluster):
    default_plan(recipe(plan, **more), cluster)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_no_configuration_that_is_shown_to_train_is_refused(configuration: Configuration) -> None:
    default_plan(Recipe.from_document(configuration.recipe()), CPU)


def test_an_own_loop_brings_a_model_of_which_nothing_is_known_yet():
    for mesh in ({"tensor": 2}, {"context": 2}, {"shard": 2}):
        default_plan(recipe({"mesh": mesh}, model={"use": "own"}), CPU, 2, own_loop=True)
