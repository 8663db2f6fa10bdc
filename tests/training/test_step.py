"""A step: its gradient is that of the mean over the whole global batch, however the batch is cut up."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.data.loader import Indexed, Loader, MicroBatch, Slices
from gradus.models import catalogue
from gradus.parallel.world import alone
from gradus.schema.recipe import OptimizerBlock, Recipe
from gradus.training.objective import Objective
from gradus.training.optimizers import build_optimizer
from gradus.training.precision import numbers_for
from gradus.training.step import TrainingStep

CPU = torch.device("cpu")
BATCH, CONTEXT = 8, 12
# Valid targets of each sample: very unequal, some with none, so that a mean of means is far from the mean.
VALID = (12, 1, 0, 0, 3, 12, 7, 2)


def tokens_and_targets() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 16, (BATCH, CONTEXT), generator=generator)
    targets = torch.randint(0, 16, (BATCH, CONTEXT), generator=generator)
    for sample, valid in enumerate(VALID):
        targets[sample, valid:] = -100
    return tokens, targets


def small_gpt() -> nn.Module:
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return catalogue.build(
            "gpt", {"layers": 2, "width": 16, "heads": 2, "context": CONTEXT, "vocabulary": 16, "tied": False}
        )
    finally:
        torch.set_default_dtype(before)


def recipe(**changes: Any) -> Recipe:
    document = {"name": "t", "model": {"use": "gpt"}, "data": {"use": "stdlib-text"}, "batch": BATCH, "steps": 1}
    return Recipe.from_document({**document, "optimizer": {"use": "sgd", "lr": 1.0}, **changes})


def stepped(model: nn.Module, accumulate: int, clip: float | None = None, **changes: Any) -> TrainingStep:
    return TrainingStep(
        model,
        build_optimizer(model, OptimizerBlock(use="sgd", lr=1.0)),
        Objective(recipe(**changes), model),
        numbers_for("fp64", CPU),
        alone(CPU),
        accumulate=accumulate,
        clip=clip,
        seed=1,
    )


def cut(accumulate: int) -> Iterator[MicroBatch]:
    tokens, targets = tokens_and_targets()
    size = BATCH // accumulate
    for first in range(0, BATCH, size):
        part = slice(first, first + size)
        yield MicroBatch({"tokens": tokens[part], "targets": targets[part]}, size, first)


def gradients_by_hand(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over all valid targets of the batch, in one piece, without any of our code but the model's."""
    tokens, targets = tokens_and_targets()
    logits = model(tokens)
    loss = F.cross_entropy(logits.reshape(-1, 16), targets.reshape(-1), ignore_index=-100, reduction="mean")
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))


def moved_by(step: TrainingStep, micro_batches: Iterator[MicroBatch]) -> tuple[Any, dict[str, Tensor]]:
    """With plain SGD and a rate of 1, what a step subtracts is the gradient."""
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    numbers = step.run(micro_batches, 0, 1.0, measure_norm=True).wait()
    return numbers, {name: before[name] - p.detach() for name, p in step.model.named_parameters()}


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
def test_gradient_is_that_of_the_whole_batch_whatever_each_micro_batch_holds(accumulate: int) -> None:
    model = small_gpt()
    loss, expected = gradients_by_hand(model)
    numbers, found = moved_by(stepped(model, accumulate), cut(accumulate))
    assert numbers.loss == pytest.approx(loss.item(), rel=1e-12)
    norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    assert numbers.grad_norm == pytest.approx(norm, rel=1e-12)
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max().item() < 1e-12, name


def test_a_mean_of_means_would_be_something_else() -> None:
    """The test above could not fail if the counts were equal, or the losses of the halves."""
    model = small_gpt()
    with torch.no_grad():  # so far from its start that it prefers some tokens
        for parameter in model.parameters():
            parameter.mul_(5.0)
    means = []
    for micro in cut(2):
        logits = model(micro.inputs["tokens"])  # type: ignore[call-overload]
        means.append(F.cross_entropy(logits.reshape(-1, 16), micro.inputs["targets"].reshape(-1)))  # type: ignore
    loss, _ = gradients_by_hand(model)
    assert abs(torch.stack(means).mean().item() - loss.item()) > 1e-3


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_clipping_is_that_of_torch(accumulate: int, clip: float) -> None:
    model = small_gpt()
    reference = copy.deepcopy(model)
    _, gradients = gradients_by_hand(reference)
    for name, parameter in reference.named_parameters():
        parameter.grad = gradients[name].clone()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), clip)
    numbers, found = moved_by(stepped(model, accumulate, clip), cut(accumulate))
    assert numbers.grad_norm == pytest.approx(norm.item(), rel=1e-12), "what is logged is the norm before clipping"
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        assert (found[name] - parameter.grad).abs().max().item() < 1e-12, name


def test_gradients_are_gone_after_a_step_and_the_rate_is_the_one_given() -> None:
    step = stepped(small_gpt(), 2)
    step.run(cut(2), 0, 0.25, measure_norm=False)
    assert all(p.grad is None for p in step.model.parameters())
    assert {group["lr"] for group in step.optimizer.param_groups} == {0.25}


def test_the_norm_is_measured_only_if_somebody_wants_it() -> None:
    assert stepped(small_gpt(), 1).run(cut(1), 0, 1.0, measure_norm=False).wait().grad_norm is None
    assert stepped(small_gpt(), 1, clip=1.0).run(cut(1), 0, 1.0, measure_norm=False).wait().grad_norm is not None


class Regression:
    """Items of a line with noise."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, 3, generator=generator, dtype=torch.float64)
        self.y = torch.randn(length, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("samples", [8, 7, 5, 2, 1])
def test_a_ragged_last_batch_is_a_mean_over_what_is_there(accumulate: int, samples: int) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(3, 1).double(), Regression(samples)
    slices = Slices(8, 8 // accumulate, accumulate, 0, samples)
    loader = Loader(Indexed(data), slices, CPU, torch.float64, seed=1)
    loss = ((model(data.x)[:, 0] - data.y) ** 2).mean()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    numbers, found = moved_by(stepped(model, accumulate, loss="mse"), loader.micro_batches(0, 1))
    assert numbers.loss == pytest.approx(loss.item(), rel=1e-12)
    for gradient, wanted in zip(found.values(), expected, strict=True):
        assert (gradient - wanted).abs().max().item() < 1e-12


def test_dropout_depends_on_step_and_position_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Linear(50, 1)).double()
    data = Regression(16)
    losses = []
    for step_number, position, disturbance in ((0, 0, 1), (0, 0, 2), (1, 0, 1), (0, 8, 1)):
        torch.manual_seed(disturbance)
        step = stepped(copy.deepcopy(model), 1, loss="mse")
        micro = MicroBatch((data.x[:8], data.y[:8]), 8, position)
        losses.append(step.run(iter([micro]), step_number, 0.0, measure_norm=False).wait().loss)
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


def test_a_warm_up_step_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    before = copy.deepcopy(model.state_dict())
    data = Regression(8)
    step = stepped(model, 1, loss="mse")
    step.warm_up(iter([MicroBatch((data.x, data.y), 8, 0)]))
    assert all(p.grad is None for p in model.parameters())
    assert not any(step.optimizer.state.values())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
