"""Changed settings: in what an attempt at a run differs from the one before, for whoever looks at where it goes on."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from gradus.record.directory import RunDirectory
from gradus.schema.differences import Difference, differences
from gradus.schema.errors import GradusError
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe


def changed_settings(run: RunDirectory, attempt: int) -> list[Difference]:
    """Between the recipes and plans of two attempts, as they were resolved; none if one of them cannot be read."""
    now, earlier = _settings(run, attempt), (number for number in run.attempts if number < attempt)
    before = _settings(run, max(earlier, default=0))
    return differences(before, now) if before and now else []


def changes_text(changes: list[Difference]) -> str:
    """`optimizer.moments=fp32 (was bf16), steps=200 (was 100)`."""
    return ", ".join(f"{change.key}={_as_set(change.now)} (was {_as_set(change.before)})" for change in changes)


def _settings(run: RunDirectory, attempt: int) -> dict[str, Any]:
    """The plan stands for what the recipe says of it."""
    folder = run.attempt_path(attempt)
    with suppress(GradusError, OSError):
        recipe = Recipe.load(folder / "recipe.yaml").model_dump(exclude={"plan"})
        return {**recipe, "plan": Plan.load(folder / "plan.yaml").model_dump()}
    return {}


def _as_set(value: Any) -> str:
    """As `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)
