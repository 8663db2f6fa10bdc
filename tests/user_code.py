"""Models and datasets as users write them, with the habits that tests are about."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, random_split
from training_cases import trained

from gradus.models.output import LossOutput
from gradus.training.accumulation import WideGradients


class RaggedText(Dataset[dict[str, Tensor]]):
    """Texts of unequal length: targets beyond the end are ignored, so that samples weigh differently."""

    def __init__(self, samples: int = 120, context: int = 16, vocabulary: int = 32) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, vocabulary, (samples, context + 1), generator=generator)
        self.lengths = torch.randint(1, context + 1, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        targets = self.tokens[index, 1:].clone()
        targets[self.lengths[index] :] = -100
        return {"tokens": self.tokens[index, :-1], "targets": targets}


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int = 64) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(samples, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Labelled(Dataset[tuple[Tensor, int]]):
    def __init__(self, samples: int = 60) -> None:
        self.x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], index % 7


class PlainClassifier(nn.Module):
    """It returns logits, and knows nothing of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.last = nn.Linear(16, 31)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.body(x).relu())
        return logits


def more_points_on_rank_1() -> Dataset[Any]:
    return Points(64 + 16 * int(os.environ.get("TEST_RANK", "0")))


def all_points_to_train() -> Any:
    return Points(), Points(8)


def points_split_at_random() -> Any:
    return random_split(Points(100), [0.8, 0.2])


def other_points_on_rank_1() -> Dataset[Any]:
    points = Points(64)
    points.fingerprint = f"points of rank {os.environ['TEST_RANK']}"  # type: ignore[attr-defined]
    return points


def deeper_on_rank_1() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 1), *(nn.Linear(1, 1) for _ in range(int(os.environ.get("TEST_RANK", "0")))))


def mean_of_tokens(output: LossOutput, batch: Any) -> Tensor:
    return output.loss_sum / output.count


def sum_of_tokens(output: LossOutput, batch: Any) -> tuple[Tensor, Tensor]:
    return output.loss_sum, output.count


def on_unequal_ranks(world: Any, folder: str, recipe: Any) -> Any:
    """Run by the pool: train where a callable returns more on rank 1 than on rank 0."""
    os.environ["TEST_RANK"] = str(world.rank)
    return trained(world, folder, recipe)


def line() -> nn.Module:
    return nn.Linear(4, 1)


class Bf16Line(nn.Linear):
    """With parameters as a checkpoint in 16 bit leaves them."""

    def __init__(self) -> None:
        super().__init__(4, 1, dtype=torch.bfloat16)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16())


def one_large_and_many_small() -> Any:
    """The gradient of the first weight is 512 for one sample and 1 for the others."""
    x = torch.zeros(64, 4)
    x[:, 0] = 1.0
    x[0, 0] = 512.0
    data = [(row, torch.zeros(1)) for row in x]
    return data, data[:1]


def output_itself(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.sum(), output.shape[0]


def gradients_of_other_parts(world: Any) -> tuple[float, float]:
    """Run by the pool: rank 0 has a gradient for the first parameter only, rank 1 for the second only."""
    parameters = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    sums = WideGradients(parameters)
    (parameters[world.rank] * (5.0 * (world.rank + 1))).sum().backward()
    sums.take()
    sums.give(world)
    gradients = [parameter.grad for parameter in parameters]
    assert all(gradient is not None for gradient in gradients)
    return tuple(float(gradient[0]) for gradient in gradients if gradient is not None)  # type: ignore[return-value]


class Poisoned(nn.Module):
    """Its loss stays finite while its gradient is not, from one call on: a sqrt at zero does that."""

    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.at_call, self.calls = at_call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        y: Tensor = self.linear(x)
        return y + torch.sqrt(y * 0) if self.training and self.calls == self.at_call else y


def raising_metric(output: Any, batch: Any) -> Any:
    raise ValueError("this metric is broken")


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


class TakesOther(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return super().forward(x + z)


class NumpyPoints(Points):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x.double().numpy(), y.double().numpy()
