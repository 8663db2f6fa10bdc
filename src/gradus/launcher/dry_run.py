"""A dry run: everything is built on all ranks, one step is made, and nothing is left behind unless it fails."""

from __future__ import annotations

import shutil

from gradus.launcher.attempt import Launch
from gradus.launcher.result import Result
from gradus.record.outcome import read_outcome


def finish_dry_run(launch: Launch, result: Result) -> list[str]:
    """What was built, as rank 0 tells it. The directory of a dry run that went well is removed."""
    outcome = read_outcome(launch.run, launch.attempt) or {}
    summary = [str(line) for line in outcome.get("summary", [])]
    if result.error is None:
        shutil.rmtree(launch.run.path.parent.parent)
    return summary
