"""Each pass over the data is reported with its mean loss and its speed, whatever the steps are."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from pool import Pool
from user_runs import attempt, line_recipe

from gradus.launcher.result import Result
from gradus.record.directory import RunDirectory
from gradus.record.metrics import epochs, read_metrics
from gradus.record.progress import Progress
from gradus.training.epochs import Epoch, EpochSums
from gradus.training.readback import StepNumbers

SAMPLES = 58  # for training, of the 64 points


def numbers(loss_sum: float, count: float) -> StepNumbers:
    return StepNumbers(loss_sum, count, None, False, None, None, 0.0)


def test_the_mean_is_over_tokens_and_not_over_steps() -> None:
    sums = EpochSums()
    assert sums.add(range(4), 8, numbers(10.0, 2), 1.0) is None
    assert sums.add(range(4, 8), 8, numbers(2.0, 6), 3.0) == Epoch(1, 12 / 8, samples=8, seconds=4.0)
    assert sums == EpochSums()


def test_a_step_in_two_epochs_counts_in_each_with_its_share() -> None:
    sums = EpochSums()
    sums.add(range(4), 6, numbers(8.0, 4), 1.0)
    epoch = sums.add(range(4, 8), 6, numbers(4.0, 4), 2.0)
    assert epoch == Epoch(1, (8.0 + 2.0) / (4 + 2), samples=6, seconds=2.0)
    assert sums == EpochSums(loss_sum=2.0, count=2.0, samples=2, seconds=1.0)


def test_of_several_epochs_in_one_step_the_last_is_told() -> None:
    sums = EpochSums()
    sums.add(range(10), 20, numbers(10.0, 10), 1.0)
    assert sums.add(range(10, 65), 20, numbers(110.0, 55), 5.5) == Epoch(3, 2.0, samples=20, seconds=2.0)
    assert sums == EpochSums(loss_sum=10.0, count=5.0, samples=5, seconds=0.5)


def test_it_survives_a_checkpoint() -> None:
    sums = EpochSums(1.0, 2.0, 3.0, 4.0)
    assert EpochSums(**asdict(sums)) == sums


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_epoch_of_a_run_has_its_record(pool: Pool, run: RunDirectory, ranks: int) -> None:
    """58 samples in batches of 8: the first epoch ends with 2 of the 8 samples of step 8."""
    attempt(pool, run, line_recipe(steps=None, epochs=2, log_every=100), ranks=ranks)
    found = epochs(read_metrics(run))
    assert [(epoch["epoch"], epoch["step"]) for epoch in found] == [(1, 8), (2, 15)]
    assert found[1]["loss"] < found[0]["loss"]
    assert all(epoch["samples_per_second"] > 0 for epoch in found)
    table = Result(run, "finished", 0, 15, None).epochs
    assert table["epoch", "step"] == [{"epoch": 1, "step": 8}, {"epoch": 2, "step": 15}]


def test_the_loss_of_an_epoch_is_the_mean_of_its_steps_also_across_a_resume(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, line_recipe(steps=5))
    attempt(pool, run, line_recipe(steps=10), 2)
    rows = read_metrics(run)
    (epoch,) = epochs(rows)
    losses = [row["loss"] for row in rows]
    mean = (sum(losses[:7]) * 8 + losses[7] * 2) / SAMPLES
    assert epoch["loss"] == pytest.approx(mean, rel=1e-6)


def test_people_see_it_in_the_progress_line_and_the_summary(pool: Pool, run: RunDirectory) -> None:
    attempt(pool, run, line_recipe(steps=10))
    progress = Progress(run, 10)
    progress.poll()
    (epoch,) = epochs(read_metrics(run))
    assert f"epoch 1 loss {epoch['loss']:.4g}" in progress.line()
    assert "epoch 1" in Result(run, "finished", 0, 10, None).summary()
    assert "mean loss" in Result(run, "finished", 0, 10, None).summary()
