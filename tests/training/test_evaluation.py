"""Evaluation: exact means over the validation data, no trace in training, and when a run ends early."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradus.data.loader import Indexed, Loader, Slices
from gradus.faults.stop_request import StopRequest
from gradus.parallel.world import alone
from gradus.schema.errors import InputError
from gradus.schema.recipe import EvaluateBlock, OptimizerBlock, Recipe
from gradus.training.evaluation import Progress, evaluate
from gradus.training.objective import Objective
from gradus.training.optimizers import build_optimizer
from gradus.training.precision import numbers_for
from gradus.training.step import TrainingStep

CPU = torch.device("cpu")
RECIPE = Recipe.from_document(
    {
        "name": "t",
        "model": {"use": "gpt"},
        "data": {"use": "stdlib-text"},
        "batch": 4,
        "steps": 1,
        "optimizer": {"lr": 0.1},
        "loss": "cross-entropy",
        "metrics": ["accuracy"],
    }
)


class Points:
    """Labelled points; some labels are missing."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, 3, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 4, (length,), generator=generator)
        self.y[::5] = -100

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 4)).double()


def loader(data: Points, batch: int, total: int | None = None, workers: int = 0, seed: int | None = None) -> Loader:
    slices = Slices(batch, batch, 1, 0, len(data) if total is None else total)
    return Loader(Indexed(data), slices, CPU, torch.float64, seed=seed, workers=workers)


def evaluated(model: nn.Module, data: Points, batch: int, folder: Path, workers: int = 0) -> dict[str, float] | None:
    return evaluate(
        model,
        Objective(RECIPE, model),
        loader(data, batch, workers=workers),
        math.ceil(len(data) / batch),
        numbers_for("fp64", CPU),
        alone(CPU),
        StopRequest(folder / "stop", alone(CPU)),
    )


@pytest.mark.parametrize(("length", "batch"), [(12, 4), (13, 4), (3, 8), (101, 7)])
def test_means_are_exact_also_when_the_last_batch_is_short(tmp_path: Path, length: int, batch: int) -> None:
    model, data = classifier(), Points(length)
    found = evaluated(model, data, batch, tmp_path)
    model.eval()
    logits = model(data.x)
    assert found is not None
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(logits, data.y).item(), rel=1e-12)
    valid = data.y != -100
    assert found["accuracy"] == (logits.argmax(1) == data.y)[valid].double().mean().item()


def test_the_model_is_evaluated_in_evaluation_mode_and_put_back(tmp_path: Path) -> None:
    model = classifier().train()
    first, second = evaluated(model, Points(10), 4, tmp_path), evaluated(model, Points(10), 4, tmp_path)
    assert first == second, "dropout is off"
    assert model.training
    model.eval()
    evaluated(model, Points(10), 4, tmp_path)
    assert not model.training


@pytest.mark.parametrize("workers", [0, 1])
def test_the_next_training_step_is_the_same_with_and_without_an_evaluation(tmp_path: Path, workers: int) -> None:
    weights = []
    for evaluates in (False, True):
        model = classifier()
        step = TrainingStep(
            model,
            build_optimizer(model, OptimizerBlock(use="adamw", lr=0.1)),
            Objective(RECIPE, model),
            numbers_for("fp64", CPU),
            alone(CPU),
            accumulate=1,
            clip=None,
            seed=1,
        )
        batches = loader(Points(40), 8, total=32, seed=5).micro_batches(0, 4)
        for number in range(4):
            if evaluates:
                evaluated(model, Points(11), 4, tmp_path, workers)
            step.run(batches, number, 0.1, measure_norm=False)
        weights.append(copy.deepcopy(model.state_dict()))
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name


def test_a_stop_request_cuts_an_evaluation_short(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    model = classifier()
    assert evaluated(model, Points(40), 4, tmp_path) is None
    assert model.training


def test_only_as_many_batches_as_asked_for_are_looked_at(tmp_path: Path) -> None:
    model, data = classifier(), Points(40)
    found = evaluate(
        model,
        Objective(RECIPE, model),
        loader(data, 4, total=8),
        2,
        numbers_for("fp64", CPU),
        alone(CPU),
        StopRequest(tmp_path / "stop", alone(CPU)),
    )
    assert found is not None
    model.eval()
    expected = nn.functional.cross_entropy(model(data.x[:8]), data.y[:8]).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-12)


def noted(metric: str, values: list[float], **block: Any) -> Progress:
    progress = Progress()
    for number, value in enumerate(values, start=1):
        progress.note(10 * number, {"loss": 0.0, "accuracy": 0.0, metric: value}, EvaluateBlock(metric=metric, **block))
    return progress


def ending(metric: str, values: list[float], **block: Any) -> str | None:
    return noted(metric, values, **block).reason_to_end(EvaluateBlock(metric=metric, **block))


def test_the_best_loss_is_the_lowest_and_the_best_accuracy_the_highest() -> None:
    values = [3.0, 1.0, 2.0]
    lowest, highest = noted("loss", values), noted("accuracy", values)
    assert (lowest.best, lowest.best_step, lowest.since_best) == (1.0, 20, 1)
    assert (highest.best, highest.best_step, highest.since_best) == (3.0, 10, 2)
    assert lowest.evaluated_step == 30
    assert lowest.reason_to_end(EvaluateBlock()) is None


def test_an_equal_value_is_no_improvement() -> None:
    assert noted("loss", [1.0, 1.0]).best_step == 10


def test_a_target_is_reached_from_the_right_side() -> None:
    assert ending("loss", [3.0, 2.5], target=2.0) is None
    assert ending("loss", [3.0, 2.0], target=2.0) == "validation loss 2 reached the target 2 at step 20"
    assert ending("accuracy", [0.5, 0.8], target=0.9) is None
    assert "at step 20" in str(ending("accuracy", [0.5, 0.93], target=0.9))


def test_training_ends_when_it_no_longer_improves() -> None:
    assert ending("loss", [3.0, 2.0, 2.5], stop_after=2) is None
    assert ending("loss", [3.0, 2.0, 2.5, 1.9, 2.0], stop_after=2) is None
    found = ending("loss", [3.0, 2.0, 2.5, 2.0], stop_after=2)
    assert found == "validation loss has not improved on 2 (step 20) in 2 evaluations"


def test_a_loss_that_is_not_a_number_is_never_the_best() -> None:
    found = noted("loss", [math.nan, 2.0, math.nan])
    assert (found.best, found.best_step, found.since_best) == (2.0, 20, 1)


def test_training_ends_when_there_never_is_a_number() -> None:
    found = ending("loss", [math.nan, math.nan], stop_after=2)
    assert found == "validation loss has not been a number in 2 evaluations"


def test_an_unknown_metric_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match=r"unknown metric 'acuracy'; did you mean 'accuracy'"):
        Progress().note(1, {"loss": 1.0, "accuracy": 0.5}, EvaluateBlock(metric="acuracy"))


def test_an_own_metric_is_better_higher_unless_the_recipe_says_lower() -> None:
    assert noted("perplexity", [50.0, 20.0]).best == 50.0
    assert noted("perplexity", [50.0, 20.0], better="lower").best == 20.0
    assert ending("perplexity", [50.0], target=10.0, better="lower") is None
    assert "reached the target 10" in str(ending("perplexity", [9.0], target=10.0, better="lower"))


def test_what_was_reached_counts_only_as_long_as_the_recipe_asks_for_it() -> None:
    progress = noted("loss", [1.0], target=2.0)
    assert progress.reason_to_end(EvaluateBlock(target=2.0))
    assert progress.reason_to_end(EvaluateBlock()) is None
    assert progress.reason_to_end(EvaluateBlock(metric="accuracy", target=0.1)) is None


def test_another_metric_starts_without_a_best_value() -> None:
    progress = noted("loss", [1.0, 2.0])
    progress.note(30, {"loss": 1.0, "accuracy": 0.2}, EvaluateBlock(metric="accuracy"))
    assert (progress.best, progress.best_step, progress.since_best) == (0.2, 30, 0)


def test_parts_that_are_frozen_in_evaluation_mode_stay_so(tmp_path: Path) -> None:
    model = classifier().train()
    model.register_module("frozen", nn.Dropout(0.5).eval())
    evaluated(model, Points(8), 4, tmp_path)
    assert model.training
    assert not model.get_submodule("frozen").training
