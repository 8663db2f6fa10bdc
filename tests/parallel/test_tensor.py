"""tensor: a model whose layers are divided over ranks gives the loss and the gradients of the whole one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import huggingface_cases
import pytest
import tensor_cases
import torch
from pool import Pool
from training_cases import recipe_for, run_on

from gradus.parallel.split_rules import TENSOR_STYLES
from gradus.parallel.tensor import REPLICATE, STYLES

RELATIVE = 1e-12


def assert_same(differences: list[dict[str, float]]) -> None:
    for of_rank in differences:
        assert {"loss"} < of_rank.keys()
        assert all(value < RELATIVE for value in of_rank.values()), of_rank


@pytest.mark.parametrize("in_slices", [True, False])
@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("case", tensor_cases.REFERENCES)
def test_loss_gradients_and_answers_are_those_of_the_whole_model(
    pool: Pool, case: str, tensor: int, in_slices: bool
) -> None:
    """Of 13 classes the fourth rank has one, and three of 16 targets are ignored."""
    assert_same(pool.run(tensor, tensor_cases.compared, case, tensor, in_slices))


@pytest.mark.parametrize("tensor", [2, 4])
def test_more_ranks_than_classes_are_no_obstacle(pool: Pool, tensor: int) -> None:
    assert_same(pool.run(4, tensor_cases.compared, "gpt of few words", tensor, True))


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("user", tensor_cases.USER_PLAN),
        ("user untied", tensor_cases.OTHER_PLAN),
        ("user in slices", tensor_cases.SLICED_PLAN),
    ],
)
def test_a_users_model_is_divided_as_the_recipe_says(pool: Pool, case: str, plan: dict[str, str]) -> None:
    assert_same(pool.run(2, tensor_cases.compared, case, 2, True, plan))


@pytest.mark.parametrize("case", ["llama", "llama tied", "qwen3"])
def test_a_hugging_face_model_is_divided_as_it_says_itself(pool: Pool, case: str) -> None:
    """With grouped queries; Qwen3 has norms that each rank uses for its own heads."""
    assert_same(pool.run(4, tensor_cases.compared, case, 4, True))


def test_between_blocks_a_rank_has_a_slice_of_the_sequence_or_all_of_it(pool: Pool) -> None:
    for ways, in_slices, tokens in ((2, True, 4), (2, False, 8), (4, True, 2)):
        shapes = pool.run(ways, tensor_cases.inputs_of_blocks, in_slices)
        assert shapes == [[(2, tokens, 16)] * 2] * ways


def test_a_model_without_memory_is_divided_all_the_same(pool: Pool) -> None:
    for rank, shapes in enumerate(pool.run(4, tensor_cases.on_meta, "bert")):
        assert shapes["embedding.token.weight"] == ([4, 4, 4, 1][rank], 16)
        assert "head.decoder.weight" not in shapes, "a tied weight stays one"
        assert shapes["blocks.0.attention.qkv.weight"] == (12, 16)
        assert shapes["blocks.1.mlp.down.weight"] == (16, 16)
        assert shapes["head.norm.weight"] == (16,)


def test_dropout_differs_between_slices_and_agrees_between_copies(pool: Pool) -> None:
    assert pool.run(2, tensor_cases.parts_of_sequence, True) == [(0, 0), (0, 1)]
    assert pool.run(2, tensor_cases.parts_of_sequence, False) == [(0, 0), (0, 0)]


def test_a_sequence_that_does_not_fall_into_slices_is_refused(pool: Pool) -> None:
    for text in pool.run(4, tensor_cases.too_short):
        assert "plan.sequence_parallel: a sequence of 6 tokens cannot be cut into 4 slices" in text


REFUSALS: dict[str, tuple[Any, dict[str, str], str]] = {
    "no plan": (tensor_cases.UserModel, {}, "nothing says how the layers of UserModel are divided"),
    "unknown style": (
        tensor_cases.UserModel,
        {"layers.*.q": "colwisse"},
        "tensor_plan: found 'colwisse' for 'layers.*.q'. Allowed: colwise, colwise_gather, rowwise",
    ),
    "a style of reference models": (tensor_cases.UserModel, {"out": "vocabulary"}, "found 'vocabulary'"),
    "no such layer": (
        tensor_cases.UserModel,
        {"layers.*.p": "colwise"},
        "tensor_plan: 'layers.*.p' matches none of 19 names; did you mean 'layers.1.up'?",
    ),
    "two styles": (
        tensor_cases.UserModel,
        {"layers.*.[qo]": "colwise", "layers.*.o": "rowwise"},
        "tensor_plan: layers.0.o is both colwise and rowwise, since two patterns match it",
    ),
    "not a matrix": (
        tensor_cases.UserModel,
        {"layers.*.norm": "colwise"},
        "layers.0.norm is a LayerNorm, and colwise divides only Linear and Embedding",
    ),
    "no even shares": (
        partial(tensor_cases.UserModel, width=15, heads=3),
        {"layers.*.q": "colwise"},
        "plan.mesh.tensor: found 2, but layers.0.q, which is colwise, has 15 numbers: 2 ranks cannot share them evenly",
    ),
    "tied, but divided differently": (
        tensor_cases.UserModel,
        {"embed": "colwise_gather", "out": "colwise_gather"},
        "embed and out share one weight, of which each rank would hold some columns for the one and some rows for the",
    ),
    "heads of a hugging face model": (
        partial(tensor_cases.hugging_face, num_attention_heads=3, num_key_value_heads=3, hidden_size=12),
        {},
        "plan.mesh.tensor: found 2, but the model has 3 num_attention_heads: 2 ranks cannot share them evenly",
    ),
    "a hugging face style that is not known": (
        tensor_cases.mixtral,
        {},
        "the plan that MixtralForCausalLM carries has styles that are not supported: ",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_divided_is_refused_by_name(pool: Pool, case: str) -> None:
    make, plan, reason = REFUSALS[case]
    for text in pool.run(2, tensor_cases.refused, make, plan):
        assert text.startswith("InputError: ")
        assert reason in text


def test_the_styles_that_recipes_may_use_are_known_before_torch_is() -> None:
    assert {*STYLES, REPLICATE} == set(TENSOR_STYLES)


def test_a_hugging_face_model_trains_divided(pool: Pool, tmp_path: Path) -> None:
    """transformers computes the loss of causal language models in float32: equality is that of float32."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", **sizes, "num_key_value_heads": 2, "vocab_size": huggingface_cases.VOCABULARY}
    model = {"use": "huggingface", "config": config, "task": "causal-lm"}
    data = {"use": f"{huggingface_cases.HERE}:Sentences"}
    found, expected = (
        run_on(
            pool,
            ways,
            tmp_path / str(ways),
            recipe_for("gpt", model=model, data=data, steps=3, plan={"mesh": {"tensor": ways}, "precision": "fp64"}),
        )
        for ways in (2, 1)
    )
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-4, atol=1e-4)
