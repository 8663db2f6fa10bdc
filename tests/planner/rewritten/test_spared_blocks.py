"""Blocks that a plan spares are those that training spares, in whatever order and however often they are called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planner_cases import recipe
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gradus.parallel.recompute import apply_recompute
from gradus.planner.memory.device_memory import NO_GPU
from gradus.planner.memory.rank_memory import MemoryFacts, predicted_memory
from gradus.planner.profile.of_recipe import profile_of
from gradus.planner.profile.program import ModelProfile
from gradus.planner.resolve import resolved
from gradus.planner.speed.throughput import hardware_flops, model_flops
from gradus.schema.callables import import_callable
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

SAMPLES, FEATURES = 64, 3 * 32 * 32

MODELS = f'''
import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.up, self.down = nn.Linear(32, times * 32), nn.Linear(times * 32, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Narrow(Wide):
    """Of another class, as blocks of a decoder are."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear({FEATURES}, 32)
        self.second_half = nn.ModuleList(Narrow(1) for _ in range(3))
        self.first_half = nn.ModuleList(Wide(16) for _ in range(3))
        self.last = nn.Linear(32, 10)

    def forward(self, images):
        x = self.first(images.flatten(1))
        for block in self.in_order():
            x = block(x)
        return self.last(x)


class OtherOrder(Model):
    """What is called last was made first."""

    def in_order(self):
        return [*self.first_half, *self.second_half]


class CalledTwice(Model):
    """As a network of two towers calls the one that they share."""

    def in_order(self):
        return 2 * [*self.second_half, *self.first_half]
'''


@pytest.fixture(autouse=True)
def users_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "halves.py").write_text(MODELS)


def traced(name: str) -> tuple[ModelProfile, nn.Module]:
    document = {"name": "p", "model": {"use": f"halves.py:{name}"}, "data": {"use": "synthetic-images"}}
    document |= {"loss": "cross-entropy", "batch": SAMPLES, "steps": 1, "optimizer": {"use": "sgd", "lr": 0.1}}
    model = import_callable(f"halves.py:{name}", "model.use")()
    return profile_of(resolved(Recipe.from_document(document)), precision="fp32"), model


def plan(blocks: int | None, **more: Any) -> Plan:
    return Plan(recompute="full", recompute_blocks=blocks, micro_batch=SAMPLES, **more)


def in_training(model: nn.Module, of: Plan, count: Callable[[nn.Module], float]) -> float:
    changed = copy.deepcopy(model)
    apply_recompute(changed, of)
    return count(changed)


def flops(model: nn.Module) -> float:
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(SAMPLES, 3, 32, 32)).sum().backward()
    return counter.get_total_flops()


def kept_bytes(model: nn.Module) -> float:
    held: dict[int, Tensor] = {}
    outside = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in outside:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(torch.randn(SAMPLES, 3, 32, 32))
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


@pytest.mark.parametrize("name", ["OtherOrder", "CalledTwice"])
def test_as_much_is_computed_again_as_training_computes_again(name: str) -> None:
    profile, model = traced(name)
    once = in_training(model, Plan(), flops)
    for blocks in (1, 2, 3, 4, 5, 6, None):
        foreseen = hardware_flops(profile, plan(blocks)) - model_flops(profile, plan(blocks))
        assert foreseen == pytest.approx(in_training(model, plan(blocks), flops) - once, rel=0.01), blocks


def test_memory_is_foreseen_of_the_blocks_that_training_recomputes() -> None:
    """Recomputing the narrow blocks saves next to nothing, and they are the first three."""
    profile, model = traced("OtherOrder")
    many = 2**14  # samples, beside which parameters are little

    def foreseen(blocks: int | None) -> float:
        of = plan(blocks).model_copy(update={"micro_batch": many})
        return predicted_memory(profile, of, MemoryFacts(device=NO_GPU)).memory.activations / many

    saves = foreseen(3) - foreseen(5)
    really = in_training(model, plan(3), kept_bytes) - in_training(model, plan(5), kept_bytes)
    assert saves == pytest.approx(really / SAMPLES, rel=0.05)
    assert foreseen(1) - foreseen(3) < 0.2 * saves


def test_blocks_are_called_one_after_the_other_unless_the_profile_says_otherwise() -> None:
    profile = profile_of(recipe(), precision="fp32")
    assert profile.block_order == ModelProfile("m", profile.parts, profile.calls).block_numbers == tuple(range(8))
