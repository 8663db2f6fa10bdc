"""What a run was told to do, flat, as dashboards show it: `recipe.optimizer.lr`, `plan.mesh.tensor`."""

from __future__ import annotations

import yaml

from gradus.record.directory import RunDirectory
from gradus.schema.differences import flat


def run_settings(run: RunDirectory) -> dict[str, str | int | float | bool]:
    """Of the newest attempt. A script has none."""
    folder = run.attempt_path(max(run.attempts, default=0))
    settings: dict[str, str | int | float | bool] = {}
    for name in ("recipe", "plan", "cluster"):
        try:
            document = yaml.safe_load((folder / f"{name}.yaml").read_text())
        except (OSError, yaml.YAMLError):
            continue
        for key, value in flat(name, document).items():
            if value is not None:
                settings[key] = value if isinstance(value, (str, int, float, bool)) else str(value)
    return settings
