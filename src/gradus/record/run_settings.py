"""What a run was told to do, flat, as dashboards show it: `recipe.optimizer.lr`, `plan.mesh.tensor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from gradus.record.directory import RunDirectory


def run_settings(run: RunDirectory) -> dict[str, str | int | float | bool]:
    """Of the newest attempt. A script has none."""
    folder = run.attempt_path(max(run.attempts, default=0))
    settings: dict[str, str | int | float | bool] = {}
    for name in ("recipe", "plan", "cluster"):
        try:
            document = yaml.safe_load((folder / f"{name}.yaml").read_text())
        except (OSError, yaml.YAMLError):
            continue
        settings |= dict(_flat(name, document))
    return settings


def _flat(name: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    elif isinstance(value, (str, int, float, bool)):
        yield name, value
    elif value is not None:
        yield name, str(value)
