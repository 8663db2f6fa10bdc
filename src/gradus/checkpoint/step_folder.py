"""Step folder: what the folder of a checkpoint is called among those of its run. No torch."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"step-(\d+)")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a folder's name says, if it is such a name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """The steps that have a folder, ascending; committed or not. Where there is no folder at all, none has."""
    try:
        found = [(step_of(path.name), path) for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((step, path) for step, path in found if step is not None)
