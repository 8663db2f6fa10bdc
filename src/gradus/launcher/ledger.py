"""Ledger: `control/ledger.jsonl`, a line for each attempt that is over: how it ended, and what was decided then."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, get_args

from gradus.checkpoint.manifest import committed_steps
from gradus.launcher.error_signature import error_signature
from gradus.launcher.script import COMMAND_FILE
from gradus.launcher.verdict import GOES_ON, Decision, Ended, EndState, Verdict, verdict
from gradus.record.append_log import AppendLog, read_lines
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter, rank_writer, read_events
from gradus.record.outcome import read_outcome

_EFFECTS = (None, "lost-peer", "launch-failed")  # errors that have their cause elsewhere
_LOST = "nobody wrote how the attempt ended: its job was killed, or a node died"


@dataclass(frozen=True)
class Settled:
    """A line of the ledger."""

    ended: Ended
    verdict: Verdict


def ledger_path(run: RunDirectory) -> Path:
    return run.control / "ledger.jsonl"


def read_ledger(run: RunDirectory) -> list[Settled]:
    """What was decided so far. Of two lines for an attempt the first stands; one that is no record is passed over."""
    found: dict[int, Settled] = {}
    for record in read_lines(ledger_path(run)).records:
        settled = _settled(record)
        if settled is not None:
            found.setdefault(settled.ended.attempt, settled)
    return list(found.values())


def settle(
    run: RunDirectory, ended: Ended, retries: int, *, cancelled: bool = False, nodes_stay: bool = True
) -> Verdict:
    """Decide what happens after an attempt, write it down, and tell it as an event.

    An attempt is settled once: whoever asks again, or at the same time, gets the decision that stands. And what cannot
    be written down is not repeated: without its history nothing would ever end the restarts.
    """
    with _alone(run):
        already = _find(read_ledger(run), ended.attempt)
        if already is not None:
            return already.verdict
        decided = verdict([*history(run), ended], retries, cancelled, nodes_stay)
        if decided.exclude:
            decided = replace(decided, exclude=tuple(dict.fromkeys([*excluded(run), *decided.exclude])))
        problem = _append(run, Settled(ended, decided))
        stands = _find(read_ledger(run), ended.attempt)
    if stands is not None and stands.verdict != decided:
        return stands.verdict  # on a file system without locks, another writer was first
    if stands is None and decided.decision in GOES_ON:
        why = problem or "the line is not there after it was written"
        decided = Verdict("failed", f"the ledger cannot be written ({why}), and without it restarts would never end")
    _tell(run, ended, decided)
    return decided


def history(run: RunDirectory) -> list[Ended]:
    """The attempts since a person last had a say: since the run was held, given up or over, and was started again."""
    lines = read_ledger(run)
    since = max((at + 1 for at, line in enumerate(lines) if line.verdict.decision not in GOES_ON), default=0)
    return [line.ended for line in lines[since:]]


def excluded(run: RunDirectory) -> list[str]:
    """All nodes that the run has been told to go on without, in the order in which they became suspect."""
    return list(dict.fromkeys(node for line in read_ledger(run) for node in line.verdict.exclude))


def unsettled(run: RunDirectory) -> int | None:
    """The newest attempt, if it has no line although nothing ends it any more; asked before a new one is made.

    One whose launcher told of its end belongs to no job of the ledger: `gradus train` made it.
    """
    newest = max(run.attempts, default=None)
    if newest is None or _find(read_ledger(run), newest) is not None:
        return None
    told = any(event.get("event") == "end" and event.get("attempt") == newest for event in read_events(run))
    return None if told else newest


def attempt_ended(
    run: RunDirectory,
    attempt: int,
    outcome: Mapping[str, Any] | None = None,
    *,
    nodes: Sequence[str] = (),
    job_id: str | None = None,
    lost_node: str | None = None,
) -> Ended:
    """How an attempt ended, from its files. `outcome` is what the launcher made of it, else what its ranks left.

    Without either it is lost. `lost_node` is the one node that left no word: if the others know only that they lost a
    peer, it is the cause.
    """
    found = outcome if outcome is not None else read_outcome(run, attempt)
    error = dict((found or {}).get("error") or {})
    state = str((found or {}).get("state", "lost"))
    if found is None:
        error = {"kind": "lost", "message": _LOST, "node": lost_node}
    elif state == "failed" and lost_node is not None and error.get("kind") in _EFFECTS:
        said = error.get("message") or "nothing"
        error = {"kind": "node-lost", "message": f"{lost_node} left no word; the others say: {said}", "node": lost_node}
    begun, reached = _steps(run, attempt, found)
    saved = max(committed_steps(run.checkpoints), default=None)
    return Ended(
        attempt=attempt,
        state=state if state in get_args(EndState) else "failed",  # type: ignore[arg-type]
        exit_code=(found or {}).get("exit_code"),
        step_begun=begun,
        step_reached=reached,
        step_saved=saved,
        stop_reason=(found or {}).get("reason") if state == "stopped" else None,
        error_kind=error.get("kind"),
        error_message=error.get("message"),
        error_signature=error_signature(error, nodes),
        rank=error.get("rank"),
        node=error.get("node"),
        nodes=tuple(nodes),
        job_id=job_id,
        ended_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        counts_steps=counts_steps(run, attempt),
    )


def _steps(run: RunDirectory, attempt: int, outcome: Mapping[str, Any] | None) -> tuple[int, int]:
    """Where an attempt began, and how far it is known to have come. One that never began is where the run was saved."""
    events = read_lines(run.events / f"{rank_writer(attempt)}.jsonl").records
    rows = [row for row in read_lines(run.metrics_path).records if row.get("attempt") == attempt]
    saves = [event for event in events if event.get("event") == "checkpoint"]
    steps = [record["step"] for record in (*rows, *saves) if isinstance(record.get("step"), int)]
    starts = [event["step"] for event in events if event.get("event") == "start" and isinstance(event.get("step"), int)]
    saved = max(committed_steps(run.checkpoints), default=0)
    begun = starts[0] if starts else saved
    # The last steps may not be logged: the rank that failed says how many it had made. What the launcher takes for the
    # step of a failure is that of the status, which may be of the attempt before.
    failed = (outcome or {}).get("state") not in ("finished", "stopped")
    told = ((outcome or {}).get("error") or {}).get("steps_made") if failed else (outcome or {}).get("step")
    return begun, max([begun, saved, *steps, *([told] if isinstance(told, int) else [])])


def counts_steps(run: RunDirectory, attempt: int) -> bool:
    """A script with our loop in it says how far it got; any other does not."""
    is_script = (run.attempt_path(attempt) / COMMAND_FILE).exists()
    return not is_script or run.own_loop_mark(attempt).exists()


@contextlib.contextmanager
def _alone(run: RunDirectory) -> Iterator[None]:
    """One at a time on a machine, and on file systems whose locks reach further, everywhere."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # no locks here, or a full disk: the first line for an attempt stands
            fcntl.flock(held.enter_context((run.control / "ledger.lock").open("a")), fcntl.LOCK_EX)
        yield


def _append(run: RunDirectory, line: Settled) -> str | None:
    """Write a line. Returns the problem if it could not be written."""
    problems: list[str] = []
    log = AppendLog(ledger_path(run), problems.append)
    log.write({**asdict(line.ended), **asdict(line.verdict), "exit_code_of_job": line.verdict.exit_code})
    problems += log.close()
    return problems[0] if problems else None


def _tell(run: RunDirectory, ended: Ended, decided: Verdict) -> None:
    events = EventWriter(run, f"launcher-attempt-{ended.attempt}")
    events.write(
        "restart" if decided.decision in GOES_ON else "verdict",
        attempt=ended.attempt,
        decision=decided.decision,
        reason=decided.reason,
        **({"exclude": list(decided.exclude)} if decided.exclude else {}),
    )
    events.close()


def _find(lines: Sequence[Settled], attempt: int) -> Settled | None:
    return next((line for line in lines if line.ended.attempt == attempt), None)


def _settled(record: Mapping[str, Any]) -> Settled | None:
    known = {entry.name: record[entry.name] for entry in fields(Ended) if entry.name in record}
    well_formed = (
        isinstance(known.get("attempt"), int)
        and known.get("state") in get_args(EndState)
        and record.get("decision") in get_args(Decision)
        and all(isinstance(known.get(name, 0), int) for name in ("step_begun", "step_reached"))
    )
    if not well_formed:
        return None
    ended = Ended(**{**known, "nodes": tuple(known.get("nodes") or ())})
    return Settled(
        ended, Verdict(record["decision"], str(record.get("reason", "")), tuple(record.get("exclude") or ()))
    )
