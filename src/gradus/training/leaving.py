"""Leaving: how a rank tells the launcher how it ended, and goes."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import traceback
from typing import Any, NoReturn

from gradus.faults.watchdog import is_lost_peer
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.record.node import node_name
from gradus.record.outcome import read_outcome, write_outcome
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, GradusError
from gradus.training.boundary import Ending
from gradus.training.live_run import LiveRun

# A rank that lost its peers waits so long for the one that failed first to say why.
_WAIT_FOR_CAUSE_SECONDS = 5.0


def tell_ending(live: LiveRun, ending: Ending, summary: list[str] | None = None) -> None:
    """Close the record of a run that ended well, and leave its outcome."""
    problems = [*live.recorder.problems, *live.recorder.close(state=ending.state, step=live.state.step)]
    if not live.world.leads:
        return
    losses = [row["loss"] for row in read_metrics(live.run) if row.get("loss") is not None]
    outcome = {
        "state": ending.state,
        "exit_code": EXIT_FINISHED if ending.state == "finished" else EXIT_STOPPED,
        "reason": ending.reason,
        "step": live.state.step,
        "loss": losses[-1] if losses else None,
        "problems": problems,
    }
    write_outcome(live.run, live.attempt, outcome | ({"summary": summary} if summary else {}))


def note_steps_made(error: Exception, steps: int) -> None:
    """Leave with an error how many steps the run had made: the same error after as many would come again."""
    with contextlib.suppress(AttributeError):  # of an exception that takes no attributes
        error.gradus_steps_made = steps  # type: ignore[attr-defined]


def _steps_made(error: BaseException | None) -> int | None:
    while error is not None:
        if hasattr(error, "gradus_steps_made"):
            return int(error.gradus_steps_made)
        error = error.__cause__ or error.__context__
    return None


def tell_failure(run: RunDirectory, attempt: int, error: Exception, rank: int) -> None:
    """Write why this rank failed, unless another rank's failure came first and explains it."""
    lost_peer = is_lost_peer(error)
    if lost_peer:
        deadline = time.monotonic() + _WAIT_FOR_CAUSE_SECONDS
        while time.monotonic() < deadline:
            if read_outcome(run, attempt) is not None:
                return
            time.sleep(0.1)
    document: dict[str, Any] = {"rank": rank, "node": node_name(), "steps_made": _steps_made(error)}
    if isinstance(error, GradusError) and not lost_peer:
        document |= error.document()
        exit_code = error.exit_code
    else:
        document |= {
            "kind": "lost-peer" if lost_peer else "exception",
            "message": f"{type(error).__name__}: {error}",
            "hint": _hint_of(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        exit_code = EXIT_FAILED
    write_outcome(run, attempt, {"state": "failed", "exit_code": exit_code, "error": document})


def _hint_of(error: Exception) -> str | None:
    """What a note upon an error of others advises (narrow_calls.py)."""
    hints = (note.removeprefix("hint: ") for note in getattr(error, "__notes__", ()) if note.startswith("hint: "))
    return next(hints, None)


def leave(code: int) -> NoReturn:
    """End this process without tearing torch down, whose threads now and then abort at exit.

    Everything of ours is written by now. What the user's code or loader workers registered for the end is done first.
    """
    atexit._run_exitfuncs()
    end(code)


def end(code: int) -> NoReturn:
    """End this process here and now. What was printed is not lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
