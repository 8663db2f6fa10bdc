"""Freezing: what a pattern names is not trained, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradus.models.gpt import GPT
from gradus.models.settings import GPTSettings
from gradus.schema.errors import InputError
from gradus.schema.recipe import OptimizerBlock
from gradus.training.freezing import freeze
from gradus.training.optimizers import build_optimizer


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTSettings(layers=2, width=16, heads=2, context=8, vocabulary=11))


def test_what_is_frozen_gets_no_gradient_and_no_optimizer_state() -> None:
    model = small_gpt()
    freeze(model, ["blocks.0.*", "embedding.position.weight"])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        name
        for name, _ in model.named_parameters()
        if name.startswith("blocks.0.") or name == "embedding.position.weight"
    }
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerBlock(use="adamw", lr=0.1, weight_decay=0.1))
    tokens = torch.randint(0, 11, (2, 8))
    model(tokens, tokens).loss_sum.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in frozen), name
        assert (parameter in optimizer.state) == (name not in frozen), name
        assert torch.equal(parameter, before[name]) == (name in frozen), name


def test_a_tied_parameter_goes_by_any_of_its_names() -> None:
    model = small_gpt()
    freeze(model, ["head.output.weight"])
    assert not model.embedding.token.weight.requires_grad


def test_a_pattern_that_matches_nothing_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"did you mean 'embedding\.token\.weight'") as caught:
        freeze(small_gpt(), ["embeding.token.weight"])
    assert caught.value.details["field"] == "freeze"


def test_freezing_everything_leaves_nothing_to_train() -> None:
    with pytest.raises(InputError, match="leaves none of 2 parameters to train") as caught:
        freeze(nn.Linear(2, 2), ["*"])
    assert "lora" in str(caught.value.hint)
