"""Asking a run to stop: a file in its control folder, which rank 0 looks for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from gradus.record.directory import RunDirectory


def request_stop(run: RunDirectory, reason: str, *, now: bool = False) -> None:
    """Ask the run to save and leave, or, `now`, to end without. The file appears whole or not at all."""
    temporary = run.stop_file.with_name(f"stop.{os.getpid()}")
    document = {"reason": reason, "time": datetime.now(timezone.utc).isoformat()}
    temporary.write_text(json.dumps({**document, **({"now": True} if now else {})}))
    temporary.replace(run.stop_file)


def forget_stop(run: RunDirectory, unless: Callable[[str], bool]) -> None:
    """A request that stopped the last attempt has been answered. One whose reason says otherwise stays.

    It is taken away first and looked at then, so that one that comes meanwhile is not lost with it.
    """
    aside = run.stop_file.with_name(f"answered.{os.getpid()}")
    try:
        run.stop_file.replace(aside)
    except FileNotFoundError:
        return
    reason = reason_in(aside)
    if reason is not None and unless(reason):
        aside.replace(run.stop_file)
    else:
        aside.unlink(missing_ok=True)


def requested_stop(run: RunDirectory) -> str | None:
    """Why the run was asked to stop, if it was."""
    return reason_in(run.stop_file)


def requested_end(run: RunDirectory) -> str | None:
    """Who asked the run to end at once, if somebody did."""
    return end_in(run.stop_file)


def end_in(stop_file: Path) -> str | None:
    """Who asks in a stop file for an end without a save, if somebody does."""
    try:
        document = json.loads(stop_file.read_text())
        return str(document["reason"]) if document.get("now") else None
    except (OSError, ValueError, AttributeError, KeyError):
        return None


def reason_in(stop_file: Path) -> str | None:
    """What a stop file says, if it is there. One that somebody made with `touch` is a request as well."""
    try:  # opened rather than tested for existence: a network file system may remember that it was absent
        return str(json.loads(stop_file.read_text()).get("reason", "stop requested"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError):
        return "stop file"
