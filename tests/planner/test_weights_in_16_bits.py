"""A plan gives a model weights in 16 bits if it takes them, and else says why not."""

from __future__ import annotations

from typing import Any

import format_cases
import huggingface_cases
import pytest
import torch  # noqa: F401  so that models are traced in this process

from gradus.planner.planning import plan_to_train, planned
from gradus.planner.prediction import predict
from gradus.planner.resolve import resolved
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe

GPU = GpuNumbers(name="NVIDIA H200", memory_gib=141, compute_capability=[9, 0])


def h200(gpus: int = 1, gpu: GpuNumbers | str = GPU) -> Cluster:
    return Cluster(name="h200", nodes=1, gpus_per_node=gpus, gpu=gpu, cpu_cores=16, memory_gib=512)


def recipe(name: str, **plan: Any) -> Recipe:
    return resolved(Recipe.from_document(format_cases.document(name, plan=plan)))


MIXED = "must have the same dtype, but got float32 and bfloat16"
REFUSED = {
    "WideHead": f"the model failed in head (Linear): RuntimeError: mat1 and mat2 {MIXED}",
    "WideHeadOnCuda": f"the model failed in head (Linear): RuntimeError: mat1 and mat2 {MIXED}",
    "WideGate": f"the model failed in gate (Linear): RuntimeError: self and mat2 {MIXED}",
    "WideNorm": f"the model failed in norm (LayerNorm): RuntimeError: input and weight {MIXED}",
    "MaskToken": f"the model failed: RuntimeError: self and values {MIXED}",
    "Refusing": "the model failed: RuntimeError: expected scalar type Float but found BFloat16",
    "Asserting": "the model failed: AssertionError: weights of 32 bits",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_model_that_does_not_take_them_has_wide_ones_and_the_plan_says_why(name: str, gpus: int) -> None:
    for choice in (plan_to_train(recipe(name), h200(gpus), 1)[0], planned(recipe(name), h200(gpus), 1).choices[0]):
        assert choice.plan.precision == "bf16"
        assert not choice.plan.narrow_weights
        assert choice.reasons["narrow_weights"] == f"with weights in 16 bits {REFUSED[name]}"
        assert choice.prediction is not None
        assert choice.prediction.step is not None, "it was traced with the weights that it has"


@pytest.mark.parametrize("name", ["Plain", "CarefulHead"])
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_model_that_takes_them_has_them(name: str, gpus: int) -> None:
    assert plan_to_train(recipe(name), h200(gpus), 1)[0].plan.narrow_weights


@pytest.mark.parametrize(
    "model",
    [
        {"use": "gpt", "layers": 2, "width": 64, "heads": 4, "context": 32},
        {"use": "gpt", "layers": 2, "width": 64, "heads": 4, "context": 32, "experts": 4},
        {"use": "bert", "layers": 2, "width": 64, "heads": 4, "context": 32},
        {"use": "vit", "layers": 2, "width": 64, "heads": 4, "classes": 10, "patch": 8, "image": 32},
        {"use": "resnet18", "classes": 10, "small_input": True},
        {"use": "simple-cnn"},
    ],
)
def test_reference_models_take_them(model: dict[str, Any]) -> None:
    images = model["use"] not in ("gpt", "bert")
    data = {"use": "synthetic-images", "size": 32} if images else {"use": "synthetic-tokens"}
    if model["use"] == "bert":
        data["objective"] = "masked"
    given = Recipe.from_document(format_cases.document("", model=model, data=data, loss=None))
    choice = plan_to_train(resolved(given), h200(), 1)[0]
    assert choice.plan.narrow_weights, choice.reasons["narrow_weights"]
    assert choice.prediction.step is not None


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_of_transformers_take_them(name: str) -> None:
    pytest.importorskip("transformers")
    here = huggingface_cases.HERE
    document = format_cases.document("", model={"use": f"{here}:{name}"}, data={"use": f"{here}:Sentences"}, loss=None)
    choice = plan_to_train(resolved(Recipe.from_document(document)), h200(), 1)[0]
    assert choice.plan.narrow_weights, choice.reasons["narrow_weights"]


def test_a_recipe_that_asks_for_them_all_the_same_is_bad_input() -> None:
    asked = recipe("WideHead", narrow_weights=True)
    for make in (plan_to_train, planned):
        with pytest.raises(InputError) as caught:
            make(asked, h200(), 1)
        assert caught.value.message.endswith(f"found true, but with weights in 16 bits {REFUSED['WideHead']}")
        assert caught.value.hint == "use plan.narrow_weights=false"
        assert caught.value.details["field"] == "plan.narrow_weights"
    with pytest.raises(InputError, match=r"plan\.narrow_weights: found true"):
        planned(asked, h200(gpu="unknown"), 1)
    with pytest.raises(InputError, match=r"plan\.narrow_weights: found true"):
        predict(recipe("WideHead"), h200(), {"narrow_weights": True})


def test_a_model_that_fails_in_any_case_is_told_of_itself_alone() -> None:
    with pytest.raises(InputError, match=r"the model failed in head \(Linear\): RuntimeError: .*same reduction dim"):
        planned(recipe("Wrong", narrow_weights=True), h200(), 1)


def test_shards_are_weights_in_16_bits_too() -> None:
    """FSDP2 gathers them in that format."""
    found = planned(recipe("WideHead"), h200(2), 2)
    assert [str(choice.plan.mesh) for choice in found.choices] == ["replicate 2"]
    [why] = [refused["reason"] for refused in found.refused if refused["plan"] == "shard 2"]
    assert why == f"sharded parameters are gathered in 16 bits, and with such {REFUSED['WideHead']}"
    assert any(choice.plan.zero for choice in planned(recipe("CarefulHead"), h200(2), 2).choices)
    for plan in ({"mesh": {"shard": 2}}, {"zero": 2}):
        with pytest.raises(InputError, match=r"plan\.mesh: found \{shard: 2\}, but sharded parameters are gathered"):
            plan_to_train(recipe("WideHead", **plan), h200(2), 2)
    assert plan_to_train(recipe("WideHead", mesh={"shard": 2}, precision="fp32"), h200(2), 2)[0].plan.zero
