"""A model that cannot be traced is estimated from its parameters, and the prediction says so."""

from __future__ import annotations

import textwrap

import pytest

import gradus
from gradus.planner.profile.of_recipe import profile_of
from gradus.planner.resolve import resolved
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.errors import NoPlanFits
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

CODE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, leaves_torch, width):
        super().__init__()
        self.leaves_torch = leaves_torch
        self.blocks = nn.ModuleList(Block(width) for _ in range(5))
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        scale = float(x.numpy().mean()) if self.leaves_torch else 1.0
        for block in self.blocks:
            x = block(x)
        return self.out(x) * scale


class OfText(Net):
    def __init__(self, width):
        super().__init__(True, width)

    def forward(self, tokens):
        return super().forward(tokens)


def build(leaves_torch=True, width=64):
    return Net(leaves_torch, width)


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


def test_no_time_is_predicted_and_the_output_agrees(recipe):
    """Nor is more said to be counted of activations than is."""
    found = gradus.predict(recipe(), Cluster.load("dgx-h100"), Plan(micro_batch=4, precision="bf16"))
    assert (found.step, found.step_error, found.budget, found.mfu) == (None, None, None, None)
    (estimated,) = [sentence for sentence in found.basis if "parameters alone" in sentence]
    assert estimated.endswith("no activations but its batch and what libraries ask for, and no time is predicted.")
    assert not any("Speeds of" in sentence or "holds up the step" in sentence for sentence in found.basis)


def test_the_batch_is_cut_up_no_more_than_the_estimate_asks_for(recipe):
    """No plan of it is said to fit, so that one that does was looked for down to single samples, and on the host."""
    best, *others = gradus.plan(recipe(), "dgx-h100", 1)
    assert (best.plan.micro_batch, best.plan.accumulate) == (4, 1)
    assert best.reasons["micro_batch"] == "all 4 samples of a rank at once"
    assert (best.plan.recompute_blocks, best.plan.loss_chunks, best.plan.cuda_graph) == (None, 1, False)
    assert best.prediction.verdict == "tight"
    assert not others


def test_one_gpu_is_enough_for_what_the_estimate_lets_fit_there(recipe):
    assert gradus.plan(recipe(), "dgx-h100")[0].plan.mesh.world_size == 1


def test_what_the_estimate_does_not_let_fit_is_cut_up(recipe):
    """Blocks of samples that are tokens keep activations, as those of transformers do."""
    document = recipe(width=1024).model_dump(exclude_unset=True)
    document["model"] |= {"use": "leaving.py:OfText"}
    document |= {"data": {"use": "synthetic-tokens", "context": 512, "vocabulary": 64}, "batch": 256}
    site = Cluster.load("dgx-h100").model_copy(update={"gpu": GpuNumbers(name="H100", memory_gib=4.0)})
    best = gradus.plan(Recipe.from_document(document), site, 1)[0]
    assert 1 <= best.plan.micro_batch < 256
    larger = best.plan.model_copy(update={"micro_batch": 256, "accumulate": 1})
    assert gradus.predict(Recipe.from_document(document), site, larger).memory.peak > 4 * 2**30 / 1.5


def test_a_limit_of_time_is_refused(recipe):
    with pytest.raises(NoPlanFits, match=r"--deadline cannot be kept: the model could not be traced"):
        gradus.plan(recipe(), "dgx-h100", 1, deadline="1h")
