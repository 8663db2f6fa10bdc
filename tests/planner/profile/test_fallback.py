"""A model that cannot be traced is estimated from its parameters, and the prediction says so."""

from __future__ import annotations

import textwrap

import pytest

import gradus
from gradus.planner.profile.of_recipe import profile_of
from gradus.planner.resolve import resolved
from gradus.schema.cluster import Cluster
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

CODE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, leaves_torch):
        super().__init__()
        self.leaves_torch = leaves_torch
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        scale = float(x.numpy().mean()) if self.leaves_torch else 1.0
        for block in self.blocks:
            x = block(x)
        return self.out(x) * scale


def build(leaves_torch=True):
    return Net(leaves_torch)


def data():
    return [(torch.ones(64), 3)] * 32
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaving.py").write_text(textwrap.dedent(CODE))

    def recipe_of(**model):
        document = {
            "name": "leaving",
            "model": {"use": "leaving.py:build", **model},
            "data": {"use": "leaving.py:data"},
            "loss": "cross-entropy",
            "batch": 4,
            "steps": 1,
            "optimizer": {"use": "adamw", "lr": 1e-3},
        }
        return resolved(Recipe.from_document(document))

    return recipe_of


def test_parameters_and_work_are_as_in_a_trace(recipe):
    traced = profile_of(recipe(leaves_torch=False), precision="fp32")
    estimated = profile_of(recipe(), precision="fp32")
    assert traced.traced
    assert not estimated.traced
    assert estimated.parameters == traced.parameters
    assert len(estimated.blocks) == len(traced.blocks) == 5
    # Biases are counted as work, and the first layer's input needs no gradient.
    assert estimated.flops(8) == pytest.approx(traced.flops(8), rel=0.15)


def test_the_prediction_says_that_it_is_an_estimate_and_never_that_it_fits(recipe):
    found = gradus.predict(recipe(), Cluster.load("dgx-h100"), Plan(micro_batch=4, precision="bf16"))
    assert found.verdict == "tight"
    assert found.memory_error == 0.5
    said = " ".join(found.basis)
    assert "could not be traced" in said
    assert "numpy" in said
    assert "parameters alone" in said
    assert found.memory.optimizer > 0


def test_what_cannot_even_hold_its_parameters_does_not_fit(recipe):
    small = Plan(micro_batch=4, precision="bf16", memory_limit_gib=0.0001)
    assert gradus.predict(recipe(), Cluster.load("dgx-h100"), small).verdict == "no"
