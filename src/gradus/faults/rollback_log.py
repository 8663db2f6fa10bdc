"""The rollback log: how often a run went back, and what it leaves out since. It does not go back with the run.

`control/rollbacks.jsonl` has a line for each time, written before anything is undone. A run that is killed while it
goes back, or before its next checkpoint, goes on without the same samples all the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gradus.record.append_log import AppendLog, read_lines
from gradus.record.directory import RunDirectory
from gradus.record.durable import flush
from gradus.record.problem import OnProblem

MOST_ROLLBACKS = 3  # for a whole run


@dataclass(frozen=True)
class Rollback:
    step: int  # at which it was decided, counted in steps done
    to_step: int | None  # the newest checkpoint that is not later than the fault; None: from the beginning
    skipped: tuple[int, int] | None  # positions of the stream: first, one past the last; None where no data is to blame
    why: str


def read_rollbacks(run: RunDirectory) -> list[Rollback]:
    return [_rollback(record) for record in read_lines(run.control / "rollbacks.jsonl").records]


def note_rollback(run: RunDirectory, rollback: Rollback, on_problem: OnProblem) -> None:
    """On the disk when this returns, unless the disk refuses: then that is a problem to be told of."""
    path = run.control / "rollbacks.jsonl"
    log = AppendLog(path, on_problem)
    log.write(asdict(rollback))
    for problem in log.close():
        on_problem(problem)
    try:
        flush(path)
    except OSError as error:
        on_problem(f"{path}: not known to be on the disk: {error.strerror or error}")


def _rollback(record: dict[str, Any]) -> Rollback:
    skipped = record["skipped"]
    span = (int(skipped[0]), int(skipped[1])) if skipped is not None else None
    return Rollback(record["step"], record["to_step"], span, record["why"])
