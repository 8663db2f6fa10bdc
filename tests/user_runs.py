"""Runs of code that a user brought: a straight line through points."""

from __future__ import annotations

from typing import Any

import user_code
from pool import Pool
from training_cases import recipe_for, trained

from gradus.record.directory import RunDirectory
from gradus.schema.recipe import Recipe

HERE = user_code.__file__


def line_recipe(**changes: Any) -> Recipe:
    """A straight line through points, by code of a user's own."""
    document = {
        "model": {"use": f"{HERE}:line"},
        "data": {"use": f"{HERE}:Points"},
        "loss": "mse",
        "optimizer": {"use": "sgd", "lr": 0.01},
        "batch": 8,
        "steps": 10,
        **changes,
    }
    return recipe_for("gpt", **document)


def attempt(pool: Pool, run: RunDirectory, recipe: Recipe, number: int = 1, ranks: int = 1) -> list[dict[str, Any]]:
    return pool.run(ranks, trained, str(run.path), recipe, number)
