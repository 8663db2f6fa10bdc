"""Optimizers: which parameters decay, that each does what its paper says, and that bad settings are told as such."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradus.models import catalogue
from gradus.schema.errors import InputError
from gradus.schema.recipe import OptimizerBlock
from gradus.training.layerwise import Lamb, Lars
from gradus.training.optimizers import build_optimizer, parameter_groups

STEPS = 12


def block(use: str = "adamw", **keys: Any) -> OptimizerBlock:
    return OptimizerBlock(**{"use": use, "lr": 0.1, "weight_decay": 0.1, **keys})


def small_model() -> nn.Module:
    """A matrix, a table, a norm, biases, and a matrix of zeros, which has no norm to scale by."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Embedding(4, 5), nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()
    nn.init.zeros_(model[3].weight)
    return model


def gradients(model: nn.Module) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()] for _ in range(STEPS)
    ]


def trained_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[np.ndarray[Any, Any]]:
    for of_step in gradients(model):
        for parameter, gradient in zip(model.parameters(), of_step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [p.detach().numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize("name", ["gpt", "bert", "vit", "simple-cnn", "resnet18"])
def test_norms_and_biases_do_not_decay_by_default(name: str) -> None:
    with torch.device("meta"):
        model = catalogue.build(name, {})
    decaying, exempt = parameter_groups(model, block())
    assert decaying["weight_decay"] == 0.1
    assert exempt["weight_decay"] == 0.0
    names = {id(p): key for key, p in model.named_parameters()}
    for parameter in exempt["params"]:
        assert parameter.ndim == 1
    norms = {
        id(p)
        for layer in model.modules()
        if isinstance(layer, (nn.LayerNorm, nn.BatchNorm2d))
        for p in layer.parameters()
    }
    biases = {id(p) for key, p in model.named_parameters() if key.endswith("bias")}
    assert {id(p) for p in exempt["params"]} == norms | biases
    every = [id(p) for group in (decaying, exempt) for p in group["params"]]
    assert sorted(every) == sorted(names), "each parameter is in one group, once, also if it is tied"


def test_norms_and_biases_decay_where_the_recipe_says_so() -> None:
    model = small_model()
    (group,) = parameter_groups(model, block(decay_norms_and_biases=True))
    assert group["weight_decay"] == 0.1
    assert len(group["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out_and_a_frozen_model_is_refused() -> None:
    model = small_model()
    model[1].requires_grad_(False)
    chosen = [p for group in parameter_groups(model, block()) for p in group["params"]]
    assert len(chosen) == len(list(model.parameters())) - 2
    model.requires_grad_(False)
    with pytest.raises(InputError, match="no parameters that require gradients"):
        parameter_groups(model, block())


def test_a_model_of_vectors_only_has_one_group() -> None:
    assert len(parameter_groups(nn.LayerNorm(3), block())) == 1


@pytest.mark.parametrize("options", [{}, {"betas": [0.8, 0.95], "eps": 1e-6}])
def test_adamw_is_torchs_own_without_fusion(options: dict[str, Any]) -> None:
    found = trained_by(model := small_model(), build_optimizer(model, block(**options)))
    model = small_model()
    groups = parameter_groups(model, block())
    keys = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    expected = trained_by(model, torch.optim.AdamW(groups, lr=0.1, fused=False, foreach=False, **keys))
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() < 1e-12


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.3}]
)
def test_sgd_is_torchs_own_without_fusion(options: dict[str, Any]) -> None:
    found = trained_by(model := small_model(), build_optimizer(model, block("sgd", **options)))
    model = small_model()
    plain = torch.optim.SGD(parameter_groups(model, block()), lr=0.1, fused=False, foreach=False, **options)
    for ours, theirs in zip(found, trained_by(model, plain), strict=True):
        assert np.abs(ours - theirs).max() < 1e-12


def test_adadelta_is_torchs_own() -> None:
    found = trained_by(model := small_model(), build_optimizer(model, block("adadelta", rho=0.8)))
    model = small_model()
    plain = torch.optim.Adadelta(parameter_groups(model, block()), lr=0.1, rho=0.8, foreach=False)
    for ours, theirs in zip(found, trained_by(model, plain), strict=True):
        assert np.abs(ours - theirs).max() < 1e-12


def test_lamb_is_algorithm_2_of_its_paper() -> None:
    """m, v with bias correction; r = m / (sqrt v + eps) + decay x; x -= lr * |x| / |r| * r, |x| or |r| = 0: ratio 1."""
    model = small_model()
    x = [p.detach().numpy().copy() for p in model.parameters()]
    m, v = [np.zeros_like(w) for w in x], [np.zeros_like(w) for w in x]
    lr, beta1, beta2, eps = 0.1, 0.9, 0.999, 1e-6
    for step, of_step in enumerate(gradients(model), start=1):
        for i, gradient in enumerate(g.numpy() for g in of_step):
            m[i] = beta1 * m[i] + (1 - beta1) * gradient
            v[i] = beta2 * v[i] + (1 - beta2) * gradient**2
            direction = (m[i] / (1 - beta1**step)) / (np.sqrt(v[i] / (1 - beta2**step)) + eps)
            direction += (0.1 if x[i].ndim >= 2 else 0.0) * x[i]
            weight_norm, update_norm = np.linalg.norm(x[i]), np.linalg.norm(direction)
            ratio = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
            x[i] = x[i] - lr * ratio * direction
    for found, expected in zip(trained_by(model, build_optimizer(model, block("lamb"))), x, strict=True):
        assert np.abs(found - expected).max() < 1e-12


def test_lamb_corrects_its_bias_as_exactly_in_fp32_as_in_fp64() -> None:
    """1 - 0.999 in fp32 is off by 1e-5; the counter of steps is fp32, the correction must not be."""
    moved = []
    for dtype in (torch.float32, torch.float64):
        parameter = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=dtype))
        optimizer = Lamb([parameter], lr=1.0, eps=100.0)  # with a large eps the size of the correction shows
        parameter.grad = torch.tensor([[1.0, 2.0]], dtype=dtype)
        optimizer.step()
        moved.append(parameter.detach().double())
    assert (moved[0] - moved[1]).abs().max() < 1e-6
    variance = torch.tensor([[1.0, 2.0]], dtype=torch.float64)  # sqrt(g²): corrected, the first step has no bias
    update = variance / (variance + 100.0)
    expected = torch.tensor([[3.0, 4.0]], dtype=torch.float64) - 5.0 * update / update.norm()
    assert (moved[1] - expected).abs().max() < 1e-12


def test_lars_is_the_algorithm_of_its_paper() -> None:
    """rate = trust |w| / (|g| + decay |w|) for matrices; v = momentum v + lr rate (g + decay w); w -= v."""
    model = small_model()
    x = [p.detach().numpy().copy() for p in model.parameters()]
    velocity = [np.zeros_like(w) for w in x]
    for of_step in gradients(model):
        for i, gradient in enumerate(g.numpy() for g in of_step):
            decay = 0.1 if x[i].ndim >= 2 else 0.0
            rate = 0.5
            if x[i].ndim >= 2 and (norm := np.linalg.norm(x[i])) > 0:
                rate *= 0.02 * norm / (np.linalg.norm(gradient) + decay * norm + 1e-8)
            velocity[i] = 0.9 * velocity[i] + rate * (gradient + decay * x[i])
            x[i] = x[i] - velocity[i]
    optimizer = build_optimizer(model, block("lars", lr=0.5, trust=0.02))
    for found, expected in zip(trained_by(model, optimizer), x, strict=True):
        assert np.abs(found - expected).max() < 1e-12


@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_a_gradient_of_zero_gives_finite_numbers(kind: type[torch.optim.Optimizer]) -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    optimizer = kind([parameter])
    for _ in range(3):
        parameter.grad = torch.zeros(3, 2)
        optimizer.step()
    assert torch.equal(parameter, torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("use", "options"),
    [
        ("adamw", {"betas": [1.5, 0.9]}),
        ("adamw", {"betas": [0.9]}),
        ("adamw", {"eps": "tiny"}),
        ("sgd", {"momentum": -1.0}),
        ("sgd", {"nesterov": True}),
        ("adadelta", {"rho": 2.0}),
        ("lamb", {"betas": [1.5, 0.9]}),
        ("lamb", {"betas": 0.9}),
        ("lamb", {"eps": -1.0}),
        ("lars", {"momentum": -0.1}),
        ("lars", {"trust": 0.0}),
        ("lars", {"eps": "tiny"}),
    ],
)
def test_bad_settings_are_refused_when_the_optimizer_is_built(use: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"optimizer: {use} refused its settings") as caught:
        build_optimizer(small_model(), block(use, **options))
    assert caught.value.details["field"] == "optimizer"


USERS = """
import torch

def slow(groups, lr, factor):
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    return torch.optim.SGD(groups, lr=lr * factor)

def nothing(groups, lr):
    return "an optimizer"

def choosy(groups, lr):
    raise ValueError("lr must be prime")
"""


@pytest.fixture
def users_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(USERS)
    return file


def test_a_users_own_optimizer_gets_the_groups_and_its_keys(users_file: Path) -> None:
    optimizer = build_optimizer(small_model(), block(f"{users_file}:slow", factor=0.5))
    assert isinstance(optimizer, torch.optim.SGD)
    assert math.isclose(optimizer.param_groups[0]["lr"], 0.05)


def test_a_users_function_that_returns_no_optimizer_is_refused(users_file: Path) -> None:
    with pytest.raises(InputError, match=r"returned str, allowed: a torch\.optim\.Optimizer"):
        build_optimizer(small_model(), block(f"{users_file}:nothing"))


def test_a_users_optimizer_that_refuses_is_quoted(users_file: Path) -> None:
    with pytest.raises(InputError, match="lr must be prime"):
        build_optimizer(small_model(), block(f"{users_file}:choosy"))


class TestGroups:
    """Parameter groups by pattern."""

    @staticmethod
    def groups(**block: object) -> list[tuple[set[str], float, float]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
        names = {parameter: name for name, parameter in model.named_parameters()}
        recipe_block = OptimizerBlock.model_validate({"lr": 0.1, "weight_decay": 0.5, **block})
        return [
            ({names[p] for p in group["params"]}, group["weight_decay"], group.get("lr_factor", 1.0))
            for group in parameter_groups(model, recipe_block)
        ]

    def test_a_parameter_belongs_to_the_first_group_that_it_matches(self) -> None:
        found = self.groups(groups=[{"match": ["0.weight"], "lr_factor": 0.1}, {"match": ["*.weight"]}])
        assert found == [
            ({"0.weight"}, 0.5, 0.1),
            ({"2.weight"}, 0.5, 1.0),
            ({"1.weight"}, 0.0, 1.0),
            ({"0.bias", "1.bias", "2.bias"}, 0.0, 1.0),
        ]

    def test_a_weight_decay_that_is_said_counts_for_vectors_too(self) -> None:
        found = self.groups(groups=[{"match": ["1.*", "0.bias"], "weight_decay": 0.25}])
        assert found[0] == ({"1.weight", "1.bias", "0.bias"}, 0.25, 1.0)

    def test_a_pattern_without_a_match_is_named(self) -> None:
        with pytest.raises(InputError, match=r"optimizer\.groups\.0\.match: '3\.weight' matches none of 6 names"):
            self.groups(groups=[{"match": ["3.weight"]}])

    def test_frozen_parameters_are_in_no_group(self) -> None:
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(False)
        [group] = parameter_groups(model, OptimizerBlock(lr=0.1))
        assert group["params"] == [model.weight]
