"""State: what is put back goes on bit for bit as if it had never been away, for every optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradus.checkpoint.state import collect, restore_model, restore_optimizer
from gradus.checkpoint.store import CheckpointStore
from gradus.models import catalogue
from gradus.schema.errors import InputError
from gradus.schema.recipe import OptimizerBlock
from gradus.training.optimizers import build_optimizer


def restore_all(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Any, numbers: Any) -> None:
    restore_model(model, tensors)
    restore_optimizer(model, optimizer, tensors, numbers, groups=True)


class Counting(torch.optim.Optimizer):
    """Keeps plain numbers for each parameter and in its parameter groups, as some optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                parameter.sub_(parameter.grad * group["lr"] / (state["steps"] + group["calls"]))


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"use": "adamw", "lr": 0.05, "weight_decay": 0.1},
    "adamw with moments in bf16": {"use": "adamw", "lr": 0.05, "weight_decay": 0.1, "moments": "bf16"},
    "sgd": {"use": "sgd", "lr": 0.05},
    "sgd with momentum": {"use": "sgd", "lr": 0.05, "momentum": 0.9},
    "sgd with dampening": {"use": "sgd", "lr": 0.05, "momentum": 0.9, "dampening": 0.1},
    "adadelta": {"use": "adadelta", "lr": 0.5},
    "lamb": {"use": "lamb", "lr": 0.05, "weight_decay": 0.1},
    "lars": {"use": "lars", "lr": 0.5, "weight_decay": 0.1},
    "a user's with plain numbers": {"use": "counting", "lr": 0.05},
    "torch adam": {"use": "torch.optim:Adam", "lr": 0.05},
    "torch nadam": {"use": "torch.optim:NAdam", "lr": 0.05},
    "torch rmsprop": {"use": "torch.optim:RMSprop", "lr": 0.05, "momentum": 0.9},
}


class Scaled(nn.Module):
    """A matrix with batch statistics, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) * self.scale
        return y


def fresh(options: dict[str, Any], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Scaled()
    if options["use"] == "counting":
        return model, Counting(model.parameters(), options["lr"])
    return model, build_optimizer(model, OptimizerBlock(**options))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_run_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    model, optimizer = fresh(OPTIMIZERS[name], seed=1)
    train(model, optimizer, 0, 4)
    store = CheckpointStore(tmp_path)
    tensors, numbers = collect(model, optimizer)
    store.save(4, tensors, {"optimizer": numbers})
    train(model, optimizer, 4, 9)

    other, other_optimizer = fresh(OPTIMIZERS[name], seed=2)
    opened = store.open(4)
    restore_all(other, other_optimizer, opened.tensors(), opened.state["optimizer"])
    train(other, other_optimizer, 4, 9)
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        expected, found = optimizer.state[parameter], other_optimizer.state[same]
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize(("saved", "wanted"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_moments_of_adamw_change_their_format_with_the_recipe(saved: str, wanted: str) -> None:
    model, optimizer = fresh({**OPTIMIZERS["adamw"], "moments": saved}, seed=1)
    train(model, optimizer, 0, 4)
    tensors, numbers = collect(model, optimizer)
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    other, other_optimizer = fresh({**OPTIMIZERS["adamw"], "moments": wanted}, seed=2)
    restore_all(other, other_optimizer, tensors, numbers)
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        kept, found = optimizer.state[before]["exp_avg"], other_optimizer.state[after]["exp_avg"]
        assert found.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[wanted]
        torch.testing.assert_close(found.float(), kept.float(), rtol=2**-7, atol=0.0)
    train(other, other_optimizer, 4, 6)


class Remembering(torch.optim.AdamW):
    """Keeps something of its own, and moments as it likes."""


def test_what_an_own_adamw_keeps_stays_as_it_is() -> None:
    model = nn.Linear(3, 2).bfloat16()
    optimizer = Remembering(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        moments = {"exp_avg": torch.rand(parameter.shape), "exp_avg_sq": torch.rand(parameter.shape)}
        optimizer.state[parameter] = {**moments, "step": torch.tensor(300.0), "seen": torch.full((2,), 301)}
    tensors, numbers = collect(model, optimizer)
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    other = Remembering(model.parameters(), lr=0.1)
    restore_optimizer(model, other, tensors, numbers, groups=True)
    for parameter, kept in optimizer.state.items():
        for key, value in kept.items():
            assert other.state[parameter][key].dtype == value.dtype
            assert torch.equal(other.state[parameter][key], value)


def test_a_parameter_of_which_the_checkpoint_lacks_something_is_refused() -> None:
    """It would go on with a fresh moment beside an old one, and nobody would see it."""
    model, optimizer = fresh(OPTIMIZERS["adamw"], seed=0)
    train(model, optimizer, 0, 2)
    tensors, numbers = collect(model, optimizer)
    missing = "optimizer.inner.0.weight.exp_avg"
    assert missing in tensors, sorted(tensors)
    whole = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    restore_all(model, optimizer, whole, numbers)
    with pytest.raises(InputError, match=r"lacks \['exp_avg'\] of inner.0.weight"):
        restore_all(model, optimizer, {name: t for name, t in whole.items() if name != missing}, numbers)
    # One that has never had a gradient has nothing, which is as it should be.
    none = {name: t for name, t in whole.items() if not name.startswith("optimizer.inner.0.weight.")}
    restore_all(model, optimizer, none, numbers)


def test_without_its_optimizer_state_the_run_would_go_on_differently(tmp_path: Path) -> None:
    """The test above means something only if the state matters."""
    model, optimizer = fresh(OPTIMIZERS["adamw"], seed=1)
    train(model, optimizer, 0, 4)
    tensors, numbers = collect(model, optimizer)
    tensors = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("model.")}
    train(model, optimizer, 4, 9)
    other, other_optimizer = fresh(OPTIMIZERS["adamw"], seed=2)
    restore_all(other, other_optimizer, tensors, numbers)
    train(other, other_optimizer, 4, 9)
    assert not torch.equal(other.inner[0].weight, model.inner[0].weight)  # type: ignore[union-attr,index]


def test_names_say_what_is_in_a_checkpoint() -> None:
    model, optimizer = fresh(OPTIMIZERS["adamw"], seed=1)
    train(model, optimizer, 0, 1)
    names = set(collect(model, optimizer)[0])
    assert {"model.inner.0.weight", "model.inner.1.running_mean", "optimizer.inner.0.weight.exp_avg"} <= names
    assert "model.scratch" not in names, "not meant to be saved"


def test_a_tied_parameter_is_saved_once_and_stays_tied() -> None:
    options = {"layers": 1, "width": 8, "heads": 2, "context": 4, "vocabulary": 11}
    model, other = catalogue.build("gpt", options), catalogue.build("gpt", options)
    block = OptimizerBlock(use="adamw", lr=0.1)
    tensors, numbers = collect(model, build_optimizer(model, block))
    assert sum(name.endswith(("token.weight", "output.weight")) for name in tensors) == 1
    restore_all(other, build_optimizer(other, block), tensors, numbers)
    assert other.head.output.weight is other.embedding.token.weight  # type: ignore[union-attr]
    assert torch.equal(other.head.output.weight, model.head.output.weight)  # type: ignore[union-attr,arg-type]


def test_a_frozen_parameter_is_saved_without_optimizer_state() -> None:
    model, _ = fresh(OPTIMIZERS["adamw"], seed=1)
    model.inner[0].requires_grad_(False)  # type: ignore[union-attr,index]
    optimizer = build_optimizer(model, OptimizerBlock(use="adamw", lr=0.1))
    train(model, optimizer, 0, 2)
    tensors, _ = collect(model, optimizer)
    assert "model.inner.0.weight" in tensors
    assert not any(name.startswith("optimizer.inner.0.") for name in tensors)


def test_state_keeps_the_memory_layout_of_its_parameter() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = build_optimizer(model, OptimizerBlock(use="adamw", lr=0.1))
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    tensors, numbers = collect(model, optimizer)
    saved = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    restore_all(model, optimizer, saved, numbers)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert optimizer.state[model.weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def other_model(model: nn.Module) -> str:
    """What is said when the state of a small model is put into this one."""
    model_there, optimizer_there = fresh(OPTIMIZERS["sgd"], seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        restore_all(
            model, build_optimizer(model, OptimizerBlock(use="sgd", lr=0.1)), *collect(model_there, optimizer_there)
        )
    assert caught.value.details["field"] == "model"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "nothing was changed"
    return caught.value.message


def test_a_checkpoint_of_another_model_is_refused_with_the_keys() -> None:
    message = other_model(nn.Sequential(nn.Linear(6, 5)))
    assert "missing ['0.bias', '0.weight']" in message
    assert "unexpected ['inner.0.bias', 'inner.0.weight'" in message


def test_a_checkpoint_of_another_shape_is_refused_with_both_shapes() -> None:
    wider = Scaled()
    wider.inner[2] = nn.Linear(5, 4)
    message = other_model(wider)
    assert "inner.2.weight is (3, 5) there and (4, 5) here" in message


def test_which_of_torchs_kernels_updates_is_the_optimizers_own_also_after_a_resume():
    """Not every one runs everywhere."""
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    fused.step()
    tensors, numbers = collect(model, fused)
    old = {**numbers, "groups": [{**g, "numbers": {**g["numbers"], "fused": True}} for g in numbers["groups"]]}
    for saved in (numbers, old):
        plain = torch.optim.AdamW(model.parameters(), fused=False)
        restore_optimizer(model, plain, tensors, saved, groups=True)
        assert plain.param_groups[0]["fused"] is False
