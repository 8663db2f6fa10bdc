"""Ending: how an attempt ended, from what its ranks left behind and what torchrun says of ranks that could not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from gradus.launcher.attempt import Launch
from gradus.launcher.job_place import read_place
from gradus.launcher.last_words import BREAKPOINT_HINT, LastWords, last_words
from gradus.launcher.rank_output import without_rank_lines
from gradus.launcher.result import Result
from gradus.launcher.script import Script
from gradus.launcher.torchrun import Death, deaths_in_log
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter
from gradus.record.goodput import run_goodput
from gradus.record.metrics import is_evaluation, read_metrics, validation_results
from gradus.record.outcome import read_outcome
from gradus.record.status import Status, read_status, write_status
from gradus.schema.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED

# Python ends by itself, or, now and then, threads of torch abort it when it has said everything.
_WITH_WORDS = (None, "SIGABRT")


@dataclass(frozen=True)
class Departure:
    """How the ranks left, as their launcher saw it."""

    return_code: int  # of torchrun
    ended_by: str | None = None  # what ended them at once: a second interrupt, or `gradus runs stop --now`
    stop_reason: str | None = None  # why the ranks of a script were sent SIGTERM
    said: Mapping[int, Sequence[str]] = field(default_factory=dict)  # the last lines of each rank
    problems: Sequence[str] = ()


def result_of(launch: Launch, departure: Departure) -> Result:
    """How an attempt ended. Writes it to status and events, too."""
    run = launch.run
    outcome = read_outcome(run, launch.attempt)
    own_outcome = outcome is not None
    if outcome is None and isinstance(launch.work, Script):
        outcome = _script_outcome(launch, launch.work, departure)
    else:
        outcome = _rank_outcome(launch, outcome, departure)
    error = outcome.get("error")
    if error and "BdbQuit" in error["message"] and not error.get("hint"):
        error = {**error, "hint": BREAKPOINT_HINT}
    rows = read_metrics(run)
    logged = max((row["step"] for row in rows if row.get("attempt") == launch.attempt), default=0)
    status = _settle_status(run, outcome["state"], error["message"] if error else None, logged)
    step = outcome.get("step", status.step if status else 0)
    loss = outcome.get("loss", next((row["loss"] for row in reversed(rows) if row.get("loss") is not None), None))
    if error and launch.log_path.exists():
        error = {**error, "log": str(launch.log_path)}
    problems = [*outcome.get("problems", []), *departure.problems]
    _write_end(launch, outcome, error, departure.problems, ranks_told=own_outcome or launch.recipe is not None)
    return Result(run, outcome["state"], outcome["exit_code"], step, loss, outcome.get("reason"), error, problems)


def note_failure(launch: Launch, error: BaseException) -> None:
    """An attempt that ends in an exception of the launching process is over, for everybody who looks at its files."""
    _settle_status(launch.run, "failed", str(error) or type(error).__name__)
    document = {"message": f"{type(error).__name__}: {error}"}
    _write_end(launch, {"state": "failed", "exit_code": EXIT_FAILED}, document, (), ranks_told=True)


def note_end_at_once(run: RunDirectory, attempt: int, by: str) -> None:
    """The end of an attempt that was killed and had no launcher that could tell of it."""
    error = _interrupted(by)
    _settle_status(run, "failed", error["message"])
    events = EventWriter(run, f"launcher-attempt-{attempt}")
    events.write("end", attempt=attempt, state="failed", exit_code=EXIT_FAILED, error=error)
    events.close()


def last_validation(run: RunDirectory) -> dict[str, float]:
    """The numbers of the last evaluation, under their keys in metrics.jsonl."""
    for row in reversed(read_metrics(run)):
        if is_evaluation(row):
            return {f"validation_{name}": value for name, value in validation_results(row).items()}
    return {}


def _rank_outcome(launch: Launch, outcome: dict[str, Any] | None, departure: Departure) -> dict[str, Any]:
    """What the ranks left for the launcher, unless they died, lost a peer that did, or failed after they wrote it."""
    failed_late = bool(outcome and not outcome.get("error") and departure.return_code and not departure.ended_by)
    if outcome and failed_late and launch.script is not None:
        # An own loop leaves through torch's end of a process, whose threads abort now and then. Its script may leave
        # with the code of a run that was stopped.
        deaths = _deaths(launch)
        failed_late = not _only_aborted(deaths) and not (outcome["state"] == "stopped" and _left_as_stopped(deaths))
    if outcome is not None and not failed_late and (outcome.get("error") or {}).get("kind") != "lost-peer":
        return outcome
    if departure.ended_by:
        died: dict[str, Any] | None = _interrupted(departure.ended_by)
    else:
        words = {rank: last_words(lines) for rank, lines in departure.said.items()}
        deaths = _deaths(launch)
        if outcome is not None and not failed_late:  # of those that lost a peer, none is the one that was lost
            deaths = [death for death in deaths if _is_a_cause(death, words)]
        died = next((death.document() for death in deaths), None)
    if outcome is not None and died is None and not failed_late:
        return outcome
    after = f"after rank 0 had {outcome['state']}" if outcome and failed_late else "and no outcome"
    error = died or _launch_failed(launch, departure, after)
    # torchrun leaves with 1 whatever its ranks do: this code is from before it, such as of an image without a torch.
    refused = died is None and outcome is None and departure.return_code == EXIT_DO_NOT_RESTART
    exit_code = EXIT_DO_NOT_RESTART if refused else EXIT_FAILED
    return {**(outcome or {}), "state": "failed", "exit_code": exit_code, "error": error}


def _interrupted(by: str) -> dict[str, Any]:
    return {"kind": "interrupted", "message": f"ended at once by {by}", "hint": None}


def _only_aborted(deaths: Sequence[Death]) -> bool:
    return bool(deaths) and all(death.signal in ("SIGABRT", "SIGTERM") for death in deaths)  # SIGTERM: of its peers


def _left_as_stopped(deaths: Sequence[Death]) -> bool:
    return bool(deaths) and all(death.exit_code == EXIT_STOPPED or death.signal == "SIGTERM" for death in deaths)


def _script_outcome(launch: Launch, script: Script, departure: Departure) -> dict[str, Any]:
    """How a script ended that says nothing of itself but its exit codes."""
    if departure.ended_by:
        return {"state": "failed", "exit_code": EXIT_FAILED, "error": _interrupted(departure.ended_by)}
    if departure.stop_reason is not None:  # whatever it made of it
        return {"state": "stopped", "exit_code": EXIT_STOPPED, "reason": departure.stop_reason}
    if departure.return_code == 0:
        return {"state": "finished", "exit_code": EXIT_FINISHED, "reason": "the script ended"}
    words = {rank: last_words(lines) for rank, lines in departure.said.items()}
    death = _first_cause(_deaths(launch), words)
    if death is None:
        return {
            "state": "failed",
            "exit_code": EXIT_DO_NOT_RESTART if departure.return_code == EXIT_DO_NOT_RESTART else EXIT_FAILED,
            "error": _launch_failed(launch, departure, "and torchrun does not say which failed first"),
        }
    if death.exit_code == EXIT_STOPPED:
        reason = f"rank {death.rank} left with exit code {EXIT_STOPPED}"
        return {"state": "stopped", "exit_code": EXIT_STOPPED, "reason": reason}
    exit_code = EXIT_DO_NOT_RESTART if death.exit_code == EXIT_DO_NOT_RESTART else EXIT_FAILED
    error = _script_error(death, words.get(death.rank) or last_words([]), script)
    return {"state": "failed", "exit_code": exit_code, "error": error}


def _first_cause(deaths: Sequence[Death], words: Mapping[int, LastWords]) -> Death | None:
    """The rank that failed by itself. torchrun looks ten times a second and may find several dead at once.

    Or one that is gone because of another, which takes longer to leave: that one's words tell.
    """
    cause = next((death for death in deaths if _is_a_cause(death, words)), None)
    if cause is not None or not deaths:
        return cause
    dead = {death.rank: death for death in deaths}
    for rank, said in words.items():
        ended = dead.get(rank)
        # torchrun may have ended it with SIGTERM while it was on its way out.
        if (ended is None or ended.signal == "SIGTERM") and said.exception and not said.lost_a_peer:
            return Death(rank, (ended or deaths[0]).node, 1)
    return deaths[0]


def _is_a_cause(death: Death, words: Mapping[int, LastWords]) -> bool:
    said = words.get(death.rank)
    lost_a_peer = said is not None and said.lost_a_peer and death.signal in _WITH_WORDS
    return death.signal != "SIGTERM" and not lost_a_peer


def _script_error(death: Death, words: LastWords, script: Script) -> dict[str, Any]:
    document = death.document()
    document["signal" if death.signal else "rank_exit_code"] = death.signal or death.exit_code
    if death.signal in _WITH_WORDS and words.exception:
        document |= {"kind": "exception", "message": words.exception, "traceback": words.traceback}
    elif words.lines:
        document["output"] = words.lines
    if death.exit_code == EXIT_DO_NOT_RESTART:
        document["kind"] = "do-not-restart"
    document["hint"] = document["hint"] or words.hint(script.text)
    return document


def _deaths(launch: Launch) -> list[Death]:
    """Of all nodes: each has a log under its name, and says there when a rank of it died.

    In a job that is the name that the scheduler knows it by. A node alone is localhost to torchrun, whatever its name.
    """
    of_a_job = read_place(launch.run, launch.attempt) is not None
    found = [
        replace(death, node=log.stem) if of_a_job or death.node in (None, "localhost") else death
        for log in sorted(launch.log_path.parent.glob("*.log"))
        for death in deaths_in_log(without_rank_lines(log.read_text(errors="replace")))
    ]
    return sorted(found, key=lambda death: (not death.was_killed, death.at))


def _launch_failed(launch: Launch, departure: Departure, after: str) -> dict[str, Any]:
    if departure.return_code == EXIT_DO_NOT_RESTART:
        message = "a node refused to start any rank, and says why in the job's output"
        return {"kind": "do-not-restart", "message": message, "hint": f"see {launch.run.job}"}
    return {
        "kind": "launch-failed",
        "message": f"the ranks left with exit code {departure.return_code} {after}",
        "hint": f"see {launch.log_path}",
    }


def _settle_status(run: RunDirectory, state: Any, message: str | None, logged: int = 0) -> Status | None:
    """The final status. Rank 0 may not have lived to write it, or may know only that it lost a peer.

    Its last sign of life may be some steps older than the last step that it logged.
    """
    status = read_status(run)
    if status is not None and status.state == "running" and logged > status.step:
        status = replace(status, step=logged)
    if status is not None:
        # Rank 0 cannot know it: the end of an attempt is part of the time that was allocated.
        goodput = run_goodput(run, until=datetime.now(timezone.utc), running=status.attempt).share
        status = replace(status, goodput=goodput)
    if status is not None and (status.state == "running" or message is not None):
        status = replace(status, state=state, last_error=message, updated_at=datetime.now(timezone.utc))
    if status is not None:
        write_status(run, status)
    return status


def _write_end(
    launch: Launch,
    outcome: Mapping[str, Any],
    error: dict[str, Any] | None,
    problems: Sequence[str],
    *,
    ranks_told: bool,
) -> None:
    """The end, and before it what ranks of a recipe or an own loop write themselves."""
    events = EventWriter(launch.run, f"launcher-attempt-{launch.attempt}")
    for problem in problems:
        events.write("finding", attempt=launch.attempt, message=problem)
    if not ranks_told and error is not None:
        events.write("fault", attempt=launch.attempt, **error)
    elif not ranks_told and outcome["state"] == "finished":
        events.write("finish", attempt=launch.attempt, reason=outcome.get("reason"))
    state, exit_code = outcome["state"], outcome["exit_code"]
    events.write("end", attempt=launch.attempt, state=state, exit_code=exit_code, error=error)
    events.close()
