"""What a run learns, from its metrics: overfitting, a loss that runs away, steps that fp16 threw away."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from diagnosis.dead_runs import findings, first, written_run


def rows(training: list[float], validation: list[float] | None = None) -> list[dict[str, Any]]:
    """A row for each step; evaluations are spread evenly over them."""
    found: list[dict[str, Any]] = [{"step": step, "loss": loss, "lr": 0.1} for step, loss in enumerate(training, 1)]
    for number, value in enumerate(validation or [], 1):
        found.append({"step": number * len(training) // len(validation or []), "validation_loss": value})
    return found


def falling(steps: int = 100, to: float = 0.1) -> list[float]:
    draw = random.Random(1)
    return [max(to, 2.3 * 0.96**step) * (1 + 0.05 * draw.random()) for step in range(steps)]


def test_a_validation_loss_that_rises_while_training_goes_on_is_overfitting(tmp_path: Path) -> None:
    validation = [2.0, 1.5, 1.2, 1.1, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5]
    found = first(written_run(tmp_path, state="finished", rows=rows(falling(), validation), step=100, ranks=1))
    assert (found.id, found.severity) == ("overfitting", "quality")
    assert found.evidence["best_step"] == 50
    assert "--set evaluate.stop_after=3 --set checkpoint.best=true" in found.change


@pytest.mark.parametrize(
    "validation",
    [
        [2.0, 1.5, 1.2, 1.1, 1.05, 1.04, 1.03, 1.03, 1.02, 1.02],  # learns
        [2.0, 1.5, 1.2, 1.1, 1.0, 1.01, 1.0, 1.01, 1.0, 1.01],  # is done
        [2.0, 1.5, 1.7, 1.4, 1.6, 1.2, 1.4, 1.3, 1.1, 1.2],  # is noisy
        [1.0, 1.2, 1.3],  # is too short
    ],
)
def test_what_does_not_overfit_is_not_blamed(tmp_path: Path, validation: list[float]) -> None:
    assert findings(written_run(tmp_path, state="finished", rows=rows(falling(), validation), step=100, ranks=1)) == ()


def test_a_run_that_stops_by_itself_and_keeps_its_best_is_not_blamed(tmp_path: Path) -> None:
    validation = [2.0, 1.5, 1.2, 1.1, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5]
    careful = {"evaluate": {"stop_after": 5}, "checkpoint": {"best": True}}
    run = written_run(tmp_path, state="finished", rows=rows(falling(), validation), recipe=careful, step=100, ranks=1)
    assert findings(run) == ()


def test_both_losses_rising_is_not_overfitting(tmp_path: Path) -> None:
    validation = [1.0, 1.1, 1.2, 1.3, 1.4]
    found = findings(written_run(tmp_path, state="finished", rows=rows([1.0] * 20, validation), step=20, ranks=1))
    assert "overfitting" not in {one.id for one in found}


def test_a_loss_that_ends_above_its_beginning_has_diverged_and_no_advice_raises_the_rate(tmp_path: Path) -> None:
    optimizer = {"use": "sgd", "lr": 0.1, "lr_batch": 4, "lr_scaling": "linear"}
    losses = [2.3, 2.0, 1.9, 2.5, 4.0, 7.0, *[9.0] * 30]
    run = written_run(tmp_path, state="finished", rows=rows(losses), recipe={"optimizer": optimizer}, step=36, ranks=1)
    found = first(run)
    assert (found.id, found.severity) == ("diverged", "quality")
    assert found.evidence["since_step"] == 5
    assert "ran away from step 5 on: 2.15 (median of steps 1 to 4), now 9 (median of steps 33 to 36)" in found.verdict
    assert found.evidence["first_loss"] == pytest.approx(2.15)
    assert found.evidence["first_loss_from"] == "median of steps 1 to 4"
    assert "the batch is 8 times the 4 that lr was for" in found.verdict
    assert "there is no warm-up" in found.verdict
    assert "--set optimizer.lr_scaling=sqrt" in found.change
    assert "--set optimizer.warmup=10" in found.change
    assert "--set optimizer.lr=0.01 (it is 0.1)" in found.change


def test_a_loss_that_came_down_and_went_up_for_good_has_diverged(tmp_path: Path) -> None:
    losses = [*falling(60), *[1.9 + 0.01 * (step % 3) for step in range(40)]]
    found = first(written_run(tmp_path, state="finished", rows=rows(losses), step=100, ranks=1))
    assert found.id == "diverged"
    assert "went up again" in found.verdict


def test_a_loss_that_burst_and_learned_nothing_has_diverged(tmp_path: Path) -> None:
    losses = [2.3, 40.0, 700.0, 90.0, 11.0, *[2.31] * 40]
    found = first(written_run(tmp_path, state="finished", rows=rows(losses), step=45, ranks=1))
    assert (found.id, found.evidence["since_step"]) == ("diverged", 3)
    assert (found.evidence["first_loss"], found.evidence["first_loss_from"]) == (2.3, "step 1")
    assert "2.3 (step 1), now 2.31 (median of steps 42 to 45)" in found.verdict


@pytest.mark.parametrize(
    "losses",
    [
        falling(),
        [2.3, 9.0, 5.0, *falling(60)],  # a rough beginning, and then it learns
        [2.3 + 0.05 * math.sin(step) for step in range(60)],  # does not learn, and does not run away
        [*falling(50), 5.0, *falling(100)[50:]],  # one hard batch
        [*falling(50), *[1.5] * 3, *falling(100)[50:]],  # a spike that goes away
        [2.3, 9.0, 20.0],  # too few to tell
    ],
)
def test_a_loss_that_does_not_run_away_is_not_blamed(tmp_path: Path, losses: list[float]) -> None:
    assert findings(written_run(tmp_path, state="finished", rows=rows(losses), step=len(losses), ranks=1)) == ()


def test_a_run_that_died_on_its_way_to_infinity_has_diverged(tmp_path: Path) -> None:
    error = {"kind": "do-not-restart", "message": "the loss is inf at step 6; the last good step is 5", "step": 6}
    run = written_run(
        tmp_path, error=error, rows=rows([1.0, 2.0, 50.0, 4e6, 9e17]), plan={"precision": "fp32"}, ranks=1
    )
    found = first(run)
    assert (found.id, found.severity) == ("diverged", "fatal")
    assert found.evidence["last_good_step"] == 5


def test_a_nan_out_of_nothing_is_not_blamed_on_the_learning_rate_alone(tmp_path: Path) -> None:
    error = {"kind": "do-not-restart", "message": "the loss is nan at step 6; the last good step is 5", "step": 6}
    run = written_run(tmp_path, error=error, rows=rows([1.0, 1.3, 0.9, 1.1, 0.8]), plan={"precision": "fp32"}, ranks=1)
    assert first(run).id == "nan"


def skips(steps: list[int]) -> list[dict[str, Any]]:
    return [{"event": "skipped-step", "step": step, "scale_before": 2.0, "scale_after": 1.0} for step in steps]


def test_steps_that_fp16_keeps_throwing_away_are_told_with_their_share(tmp_path: Path) -> None:
    run = written_run(
        *(tmp_path,),
        state="finished",
        step=200,
        events=skips([1, 2, *range(40, 200, 20)]),
        plan={"precision": "fp16"},
        ranks=1,
    )
    found = first(run)
    assert found.id == "loss-scale-skips"
    assert found.gain_at_most == 10 / 200
    assert found.change.startswith("--set plan.precision=bf16")


def test_a_loss_scale_that_settles_is_no_fault(tmp_path: Path) -> None:
    run = written_run(
        tmp_path, state="finished", step=200, events=skips([1, 2, 3, 4]), plan={"precision": "fp16"}, ranks=1
    )
    assert findings(run) == ()


def test_a_run_that_went_back_by_itself_says_so(tmp_path: Path) -> None:
    """It recovered: nobody who looks at the end of it would know."""
    went = {"event": "rollback", "step": 40, "from_step": 40, "to_step": 30, "why": "the loss is nan", "rollbacks": 1}
    run = written_run(tmp_path, state="finished", step=90, events=[{**went, "sample_indices": [137]}], ranks=1)
    found = first(run)
    assert found.id == "rolled-back"
    assert found.verdict == "the run went back 1 time, the last time from step 40 to step 30: the loss is nan"
    assert (found.gain_at_most, found.evidence["last_sample_indices"]) == (10 / 100, [137])
