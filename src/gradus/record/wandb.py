"""Weights & Biases: a run of gradus as a run of theirs, written to files unless it is told to go online.

Offline, each process that exports leaves a folder; all of a run have its id, and `wandb sync` makes one run of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradus.record.directory import RunDirectory
from gradus.record.run_settings import run_settings
from gradus.record.tracking import Row

_NOT_IN_AN_ID = re.compile(r"[^A-Za-z0-9_.-]")


def default_target(run: RunDirectory) -> str:
    return str(run.path)


class WandbTracker:
    """A run of W&B. Its x axis is our step, so that steps made again come after, and over, the discarded ones."""

    def __init__(self, run: RunDirectory, target: str, known_id: str | None) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        folder = Path(target).absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.id = known_id or _NOT_IN_AN_ID.sub("-", f"{run.name}-{run.id}")
        mode: Any = os.environ.get("WANDB_MODE", "offline")  # no account, no network, unless somebody wants them
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.name),
            id=self.id,
            name=f"{run.name}/{run.id}",
            dir=str(folder),
            mode=mode,
            resume="allow" if mode == "online" else None,
            config=run_settings(run),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                x_disable_stats=True,  # devices are ours to measure
                x_disable_meta=True,
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.place = f"{folder / 'wandb'} (wandb sync sends it)" if mode != "online" else str(self._run.url)

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({"step": row.step, "_timestamp": row.time, **row.numbers})

    def discard(self, attempt: int, first: int, last: int) -> None:
        self._run.summary[f"discarded.{attempt}.{first}"] = f"steps {first} to {last} were made again"

    def close(self, state: str) -> None:
        self._run.summary["gradus.state"] = state
        self._run.finish(exit_code=0 if state in ("finished", "stopped", "running") else 1)
