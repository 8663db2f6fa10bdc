"""What `gradus train` says to try next, by how the loss went."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up_runs import run_with

from gradus.cli.run_report import report_recipe
from gradus.launcher.result import Result
from gradus.schema.recipe import Recipe


def next_steps(folder: Path, losses: list[float], capsys: pytest.CaptureFixture[str]) -> list[str]:
    run = run_with(folder, rows=[{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)])
    recipe = Recipe.load(run.attempt_path(1) / "recipe.yaml")
    report_recipe(Result.load(run.path), recipe, "recipe.yaml")
    _, _, told = capsys.readouterr().out.partition("try next\n")
    return [line.strip() for line in told.splitlines()]


@pytest.mark.parametrize("end", [5.0, 3e4, float("inf"), float("nan")])
def test_after_a_loss_that_ran_away_explain_comes_first_and_no_rate_is_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: float
) -> None:
    first, *others = next_steps(tmp_path, [2.3, 2.0, end], capsys)
    assert first.startswith("gradus explain ")
    assert "why the loss ended far above its beginning" in first
    assert not any("optimizer.lr" in line for line in others)


@pytest.mark.parametrize("end", [0.1, 3.0])
def test_after_any_other_loss_half_the_learning_rate_is_worth_a_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: float
) -> None:
    _, half, last = next_steps(tmp_path, [2.3, 2.0, end], capsys)
    assert "optimizer.lr=0.0005" in half
    assert "what slowed it down" in last
