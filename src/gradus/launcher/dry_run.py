"""A dry run: everything is built on all ranks, one step is made, and nothing is left behind unless it fails."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from pathlib import Path

from gradus.launcher.attempt import Launch
from gradus.launcher.result import Result
from gradus.record.outcome import read_outcome


def folders_for_dry_run(runs: Path) -> tuple[Path, ...]:
    """A hidden folder among the runs, to be made, and those above it that are not there yet.

    A dry run writes a whole checkpoint, for which there is room where runs are kept. A temporary folder may be small,
    or in memory, or another one on each node.
    """
    runs = runs.absolute()
    missing = [folder for folder in (runs, *runs.parents) if not folder.exists()]
    return (runs / f".dry-run-{secrets.token_hex(4)}", *missing)


def finish_dry_run(launch: Launch, result: Result) -> list[str]:
    """What was built, as rank 0 tells it. The directory of a dry run that went well is removed."""
    outcome = read_outcome(launch.run, launch.attempt) or {}
    summary = [str(line) for line in outcome.get("summary", [])]
    if result.error is None:
        folder, *above = launch.made_for_dry_run
        shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # another run has begun there meanwhile
            for parent in above:
                parent.rmdir()
    return summary
