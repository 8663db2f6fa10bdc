"""What ranks find in their environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.launcher.torchrun import free_port, rank_environment
from gradus.schema.recipe import Recipe


@pytest.fixture
def recipe(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    document = {
        "name": "r",
        "model": {"use": "gpt"},
        "data": {"use": "stdlib-text"},
        "batch": 2,
        "steps": 1,
        "optimizer": {"use": "adamw", "lr": 1e-3},
    }
    return Recipe.from_document(document)


def test_memory_of_a_gpu_is_handed_out_in_segments_that_grow(recipe):
    assert rank_environment(1, 2, recipe)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_says_about_the_allocator_stays(recipe, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    found = {key: value for key, value in rank_environment(1, 2, recipe).items() if "ALLOC_CONF" in key}
    assert found == {name: "max_split_size_mb:64"}


def test_only_deterministic_recipes_fix_the_workspace_of_cublas(recipe):
    assert "CUBLAS_WORKSPACE_CONFIG" not in rank_environment(1, 2, recipe)
    wanted = rank_environment(1, 2, recipe.model_copy(update={"deterministic": True}))
    assert wanted["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_script_without_a_recipe_is_left_to_itself(recipe):
    assert "PYTORCH_CUDA_ALLOC_CONF" not in rank_environment(1, 2, None)


def test_a_free_port_is_none_that_the_kernel_would_give_to_others():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {free_port() for _ in range(20)}
    assert len(found) > 10
    assert max(found) < lowest
