"""A profile by module: every operator belongs to the module that ran it, forward and backward."""

from __future__ import annotations

import pytest

from gradus.planner.profile.modules import by_module, modules_text
from gradus.planner.profile.of_recipe import profile_of
from gradus.planner.resolve import resolved
from gradus.schema.recipe import Recipe

MODEL = {"use": "gpt", "layers": 5, "width": 64, "heads": 4, "context": 32, "vocabulary": 512}


@pytest.fixture(scope="module")
def profile():
    document = {
        "name": "m",
        "model": MODEL,
        "data": {"use": "synthetic-tokens", "vocabulary": 512},
        "batch": 4,
        "steps": 1,
        "optimizer": {"use": "adamw", "lr": 1e-3},
    }
    return profile_of(resolved(Recipe.from_document(document)), precision="bf16")


@pytest.mark.parametrize("depth", [None, 1, 3])
def test_rows_add_up_to_the_whole(profile, depth):
    rows = by_module(profile, 4, depth)
    assert sum(row.parameters for row in rows) == profile.parameters
    assert sum(row.forward_flops + row.backward_flops for row in rows) == pytest.approx(profile.flops(4))
    assert sum(row.kernels for row in rows) == sum(op.kernels for part in profile.called() for op in part.operators)
    kept = sum(storage.bytes.at(4) for part in profile.called() for storage in part.kept())
    assert sum(row.kept_bytes for row in rows) == pytest.approx(kept)


def test_a_layer_costs_what_its_shape_says(profile):
    up = next(row for row in by_module(profile, 4) if row.module == "blocks.0.mlp.up")
    assert up.calls == 5
    assert up.parameters == 5 * (64 * 256 + 256)
    assert up.forward_flops == 5 * 2 * (4 * 32) * 64 * 256
    assert up.backward_flops == 2 * up.forward_flops  # the gradients of its input and of its weight
    assert up.kept_bytes >= 5 * (4 * 32) * 256 * 2  # what gelu needs


def test_modules_come_in_the_order_in_which_they_run(profile):
    names = [row.module for row in by_module(profile, 4, depth=1)]
    assert names == ["embedding", "blocks", "head", ""]


def test_people_read_a_table(profile):
    lines = modules_text(by_module(profile, 4), 4).splitlines()
    assert "micro-batch of 4" in lines[0]
    assert any(line.startswith("blocks.0.attention.qkv × 5") for line in lines)
    assert len({len(line) for line in lines[1:]}) == 1
