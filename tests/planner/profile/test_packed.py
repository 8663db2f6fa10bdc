"""A recipe with packed documents is traced like any other, by a batch that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradus.planner.profile.of_recipe import profile_of
from gradus.planner.profile.program import ModelProfile
from gradus.planner.resolve import resolved
from gradus.schema.recipe import Recipe

GPT = {"use": "gpt", "layers": 4, "width": 64, "heads": 4, "context": 256, "positions": "rotary"}
HUGGINGFACE = {
    "use": "huggingface",
    "task": "causal-lm",
    "config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    | {"intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 256},
    "context": 256,
}


def profile(folder: Path, model: dict[str, Any], packing: bool) -> ModelProfile:
    file = folder / "texts.jsonl"
    file.write_text(json.dumps({"text": "some text " * 80}) + "\n")
    data = {"use": "text", "path": str(file), "cache": str(folder / "cache"), "packing": packing}
    basics = {"name": "p", "batch": 8, "steps": 1, "optimizer": {"use": "adamw", "lr": 1e-3}}
    recipe = resolved(Recipe.from_document({**basics, "model": model, "data": data}))
    return profile_of(recipe, precision="bf16")


def kept(profile: ModelProfile) -> float:
    return sum(storage.bytes.at(4) for part in profile.parts for storage in part.kept())


@pytest.mark.parametrize("model", [GPT, {**GPT, "heads": 8, "dropout": 0.1}, HUGGINGFACE], ids=["gpt", "mask", "llama"])
def test_it_is_traced_and_not_estimated(tmp_path: Path, model: dict[str, Any]) -> None:
    found = profile(tmp_path, model, packing=True)
    assert found.parts
    assert not found.notes


def test_what_a_gpu_keeps_of_documents_is_about_what_it_keeps_of_one(tmp_path: Path) -> None:
    plain, packed = (kept(profile(tmp_path, GPT, packing)) for packing in (False, True))
    # Turned by positions of each sample's own: cosines and sines have a row for each of its tokens.
    assert plain < packed < 1.3 * plain


def test_a_mask_that_is_kept_counts(tmp_path: Path) -> None:
    plain, packed = (kept(profile(tmp_path, {**GPT, "dropout": 0.1}, packing)) for packing in (False, True))
    mask = 4 * 256 * 256 * 2  # samples × scores × bytes of bf16, in each block; blocks alike are one part
    assert mask < packed - plain < 1.3 * mask
