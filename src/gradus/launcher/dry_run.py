"""A dry run: all is built on all ranks, one step is made, and nothing is left behind."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from dataclasses import replace
from pathlib import Path

from gradus.launcher.attempt import Launch
from gradus.launcher.result import Result
from gradus.launcher.run_logs import shown_lines
from gradus.record.outcome import read_outcome


def folders_for_dry_run(runs: Path) -> tuple[Path, ...]:
    """A hidden folder among the runs, to be made, and those above it that are not there yet.

    A dry run writes a whole checkpoint, for which there is room where runs are kept. A temporary folder may be small,
    or in memory, or another one on each node.
    """
    runs = runs.absolute()
    missing = [folder for folder in (runs, *runs.parents) if not folder.exists()]
    return (runs / f".dry-run-{secrets.token_hex(4)}", *missing)


def finish_dry_run(launch: Launch, result: Result) -> tuple[Result, list[str]]:
    """How it ended, and what was built, as rank 0 tells it. All files of it are gone afterwards."""
    outcome = read_outcome(launch.run, launch.attempt) or {}
    summary = [str(line) for line in outcome.get("summary", [])]
    told = _with_the_log_itself(result)
    remove_dry_run(launch)
    return told, summary


def _with_the_log_itself(result: Result) -> Result:
    """The end of the log in place of its path, to which the error of one that failed points."""
    if result.error is None or "log" not in result.error:
        return result
    error = {key: value for key, value in result.error.items() if key != "log"}
    end = "\n".join(shown_lines(Path(result.error["log"])))
    return replace(result, error={**error, "output": error.get("output") or end})


def remove_dry_run(launch: Launch) -> None:
    """Nothing is left behind."""
    folder, *above = launch.made_for_dry_run
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # another run has begun there meanwhile
        for parent in above:
            parent.rmdir()
