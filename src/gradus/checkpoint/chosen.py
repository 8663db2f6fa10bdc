"""Chosen: the folder of the checkpoint that a path and a step stand for. No torch."""

from __future__ import annotations

from pathlib import Path

from gradus.checkpoint.manifest import committed_steps, is_checkpoint
from gradus.schema.errors import InputError


def chosen_folder(path: Path, step: int | None = None) -> Path:
    """A checkpoint itself; or that of a run or a folder of them: of this step, or the newest that is committed."""
    if is_checkpoint(path):
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = committed_steps(folder)
    if not steps:
        raise InputError(f"{path}: no checkpoint there", field="RUN", found=str(path), allowed="a run or a checkpoint")
    if step is not None and step not in steps:
        raise InputError(
            f"--step: found {step}, {path} has {', '.join(map(str, steps))}",
            field="--step",
            found=step,
            allowed=list(steps),
        )
    return folder / steps[max(steps) if step is None else step]
