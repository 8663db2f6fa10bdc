"""A dry run: all is built on all ranks, one step is made, and nothing is left behind but the log of one that fails."""

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
    """What was built, as rank 0 tells it. Nothing stays but the log to which the error of one that failed points."""
    outcome = read_outcome(launch.run, launch.attempt) or {}
    summary = [str(line) for line in outcome.get("summary", [])]
    if result.error is not None and "log" in result.error:
        _remove_all_but(Path(result.error["log"]), launch.made_for_dry_run[0])
    else:
        remove_dry_run(launch)
    return summary


def remove_dry_run(launch: Launch) -> None:
    """Nothing is left behind."""
    folder, *above = launch.made_for_dry_run
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # another run has begun there meanwhile
        for parent in above:
            parent.rmdir()


def _remove_all_but(kept: Path, folder: Path) -> None:
    for entry in folder.iterdir():
        if entry == kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            if kept.is_relative_to(entry):
                _remove_all_but(kept, entry)
            else:
                shutil.rmtree(entry)
        else:
            entry.unlink()
