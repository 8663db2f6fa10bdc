"""`gradus runs`: what runs there are, and one of them in detail."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradus.cli.output import print_json, shown
from gradus.launcher.attempt import is_of_a_script, last_attempt
from gradus.launcher.ending_at_once import BY, end_at_once
from gradus.launcher.processes import attempt_processes
from gradus.launcher.run_logs import LINES, followed, last_lines, log_files, shown_lines
from gradus.launcher.script import COMMAND_FILE, Script
from gradus.launcher.slurm.queue import Queue, queue, submissions
from gradus.launcher.slurm.standing import standing
from gradus.launcher.slurm.stopping import STOP, Stopped
from gradus.launcher.slurm.stopping import cancel as slurm_cancel
from gradus.launcher.slurm.stopping import release as slurm_release
from gradus.launcher.slurm.stopping import stop as slurm_stop
from gradus.launcher.story import local_state, story_of
from gradus.record.costs import costs_of
from gradus.record.directory import RunDirectory, find_runs
from gradus.record.events import read_events
from gradus.record.format import first_line, number_text
from gradus.record.metrics import read_metrics
from gradus.record.status import read_status, shown_state, writer_is_gone
from gradus.record.stop import request_stop
from gradus.record.summary import summary_text
from gradus.schema.errors import InputError, nearest

_SHOWN_EVENTS = 12
_LEAST_WHY = 40  # columns: a shorter piece of a message says nothing, however narrow the terminal is
_LOCAL_GRACE_SECONDS = 120.0  # as much as the job of a scheduler has by default to save


@dataclass(frozen=True)
class RunsOptions:
    """What was typed after `gradus runs`."""

    words: tuple[str, ...] = ()
    runs: str = "runs"
    export: str | None = None
    to: str | None = None
    now: bool = False
    rank: int | None = None
    attempt: int | None = None
    lines: int = LINES
    follow: bool = False
    as_json: bool = False


def runs_command(options: RunsOptions) -> int:
    words, runs = list(options.words), Path(options.runs)
    if len(words) > 1:
        return _verb(words, options)
    _refuse_without_a_verb(options)
    run, as_json = words[0] if words else None, options.as_json
    if options.export is not None:
        from gradus.cli.export import export_command

        return export_command(run, options.runs, options.export, options.to, as_json)
    if options.to is not None:
        raise InputError("--to: found it without --export", field="--to", found=options.to, allowed="with --export")
    if run is None:
        documents = _documents(find_runs(runs))
        if as_json:
            print_json(documents)
        else:
            _print_table(documents, options.runs)
        return 0
    directory = RunDirectory.open(run, runs)
    if as_json:
        [document] = _documents([directory])
        document |= costs_of(directory).document()
        print_json({**document, "events": read_events(directory), "metrics": read_metrics(directory)})
    else:
        _print_run(directory)
    return 0


def _verb(words: list[str], options: RunsOptions) -> int:
    """`gradus runs VERB RUN`."""
    verbs: dict[str, Callable[[RunDirectory, RunsOptions], int]] = {
        "stop": _stop,
        "cancel": _cancel,
        "release": _release,
        "logs": _logs,
        "why": _why,
    }
    if words[0] not in verbs or len(words) != 2:
        close = nearest(words[0], verbs)
        raise InputError(
            f"RUN: found {len(words)} words: {' '.join(words)}" + (f"; did you mean {close!r}?" if close else ""),
            hint=f"gradus runs {words[-1]}, or gradus runs {close or 'stop'} {words[-1]}",
            field="RUN",
            found=" ".join(words),
            allowed=f"a run, or one of {', '.join(verbs)} and a run",
            nearest=close,
        )
    return verbs[words[0]](RunDirectory.open(words[1], Path(options.runs)), options)


def _refuse_without_a_verb(options: RunsOptions) -> None:
    run = options.words[0] if options.words else "RUN"
    given = {
        "--now": (options.now, "stop or cancel", "stop"),
        "--follow": (options.follow, "logs", "logs"),
        "--rank": (options.rank is not None, "logs", "logs"),
        "--attempt": (options.attempt is not None, "logs", "logs"),
    }
    for option, (found, verbs, verb) in given.items():
        if found:
            raise InputError(
                f"{option}: found it without {verbs}",
                hint=f"gradus runs {verb} {run} {option}",
                field=option,
                found=" ".join(options.words),
            )


def _stop(run: RunDirectory, options: RunsOptions) -> int:
    """Ask a run to save and stop. What Slurm has is then held, and a local run ends."""
    if submissions(run) and not options.now and _is_in_queue(run):
        return _done(run, slurm_stop(run), options)
    status = read_status(run)
    state = shown_state(status) if status else "unknown"
    running = status is not None and state == "running" and not writer_is_gone(status)
    if options.now and submissions(run) and _is_in_queue(run):
        return _done(run, slurm_cancel(run, at_once=True, by=BY), options)
    if options.now and status is not None and state in ("running", "lost"):  # what hangs may have no heartbeat any more
        running = running or bool(attempt_processes(run.path, status.attempt))
    if status is None or not running:
        raise InputError(
            f"{run.name}/{run.id} is not running: {'lost' if state == 'running' else state}",
            hint=f"gradus runs why {run.name}/{run.id}",
            found=state,
            allowed="running",
        )
    if options.now:
        ended = end_at_once(run, status)
        if options.as_json:
            print_json({"run": str(run.path), "requested": "end", "ended": ended})
        else:
            what = "ended" if ended else f"asked to end on {status.host}"
            print(f"{run.name}/{run.id} was {what} at once")
        return 0
    request_stop(run, STOP)
    return _done(run, Stopped("stop", f"{run.name}/{run.id} was asked to save and stop"), options)


def _cancel(run: RunDirectory, options: RunsOptions) -> int:
    """End a run for good, saved if that can be; a local one as well."""
    if submissions(run):
        return _done(run, slurm_cancel(run, at_once=options.now), options)
    code = _stop(run, options)
    if options.now or not run.attempts:
        return code
    until = time.monotonic() + _LOCAL_GRACE_SECONDS
    while time.monotonic() < until:
        status = read_status(run)
        if status is None or local_state(status) != "running":
            return code
        time.sleep(0.2)
    return _stop(run, replace(options, now=True))


def _release(run: RunDirectory, options: RunsOptions) -> int:
    return _done(run, slurm_release(run), options)


def _done(run: RunDirectory, stopped: Stopped, options: RunsOptions) -> int:
    if options.as_json:
        print_json({"run": str(run.path), "requested": stopped.did, "message": stopped.words})
    else:
        print(stopped.words)
    return 0


def _is_in_queue(run: RunDirectory) -> bool:
    found = queue(0)
    return found.problem is None and standing(run, read_status(run), found, thorough=True).in_queue


def _logs(run: RunDirectory, options: RunsOptions) -> int:
    """The end of what the newest attempt printed: its job, and all of its nodes that have something to say."""
    files = log_files(run, options.attempt)
    if options.as_json:
        logs = {str(path): last_lines(path, options.lines, options.rank) for path in files}
        print_json({"run": str(run.path), "logs": logs})
        return 0
    if not options.follow:
        said = {path: lines for path in files if (lines := shown_lines(path, options.lines, options.rank))}
        if not said:
            whose = f"rank {options.rank} of " if options.rank is not None else ""
            print(f"{whose}{run.name}/{run.id} has printed nothing yet", file=sys.stderr)
        for path, lines in said.items():
            if len(files) > 1:
                print(f"==> {shown(path)} <==")
            print("\n".join(lines))
        return 0
    last = None
    for path, line in followed(run, options.rank, goes_on=lambda: _goes_on(run), lines=options.lines):
        if path != last and (last is not None or len(files) > 1):
            print(f"==> {shown(path)} <==")
        last = path
        print(line, flush=True)
    return 0


def _goes_on(run: RunDirectory) -> bool:
    status = read_status(run)
    state = standing(run, status, queue()).state if submissions(run) else local_state(status)
    return state in ("queued", "starting", "running")


def _why(run: RunDirectory, options: RunsOptions) -> int:
    story = story_of(run)
    print_json(story.document()) if options.as_json else print(story.text())
    return 0


def _documents(runs: list[RunDirectory]) -> list[dict[str, Any]]:
    """One for each run. Slurm is asked once for all of them, if any of them may be in its queue."""
    documents = []
    asked: Queue | None = None
    for run in runs:
        document, status = _document(run), read_status(run)
        waits = status is None or status.state not in ("finished", "failed")
        if waits and submissions(run):
            asked = asked or queue()
            now = standing(run, status, asked)
            document |= {"state": now.state, "job_id": now.job_id, "note": now.note}
            document["reason"] = now.reason.text if now.reason else None
            document["starts_at"] = now.starts_at.isoformat(timespec="seconds") if now.starts_at else None
        documents.append(document)
    return documents


def _document(run: RunDirectory) -> dict[str, Any]:
    status = read_status(run)
    rows = read_metrics(run)
    loss = next((row["loss"] for row in reversed(rows) if row.get("loss") is not None), None)
    script = _command(run)
    return {
        "run": str(run.path),
        "name": run.name,
        "id": run.id,
        "state": shown_state(status) if status else "unknown",
        "step": status.step if status else None,
        "steps_total": status.steps_total if status else None,
        "attempt": status.attempt if status else None,
        "loss": loss,
        "last_error": status.last_error if status else None,
        "updated_at": status.updated_at.isoformat(timespec="seconds") if status else None,
        **({"command": script} if script else {}),
    }


def _command(run: RunDirectory) -> str | None:
    """What a script's run ran; None for a recipe's."""
    if not (run.attempts or run.job.is_dir()) or not is_of_a_script(run):
        return None
    return Script.load(last_attempt(run) / COMMAND_FILE).text


def _print_table(documents: list[dict[str, Any]], runs: str) -> None:
    if not documents:
        print(f"no runs in {runs}; start one: gradus train recipes/quickstart.yaml")
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    whys = [_why_text(d) or _error_text(d) for d in documents]
    waiting = any(whys)
    for column in ("run", "state", "step", "loss", "attempt", "updated (UTC)"):
        right = column in ("step", "loss", "attempt")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    if waiting:
        table.add_column("why", no_wrap=True)
    for d, why in zip(documents, whys, strict=True):
        steps = f"{d['step']}/{d['steps_total']}" if d["steps_total"] else str(d["step"] or "-")
        loss = number_text(d["loss"]) if d["loss"] is not None else "-"
        updated = (d["updated_at"] or "-").replace("T", " ")[:19]
        row = (f"{d['name']}/{d['id']}", d["state"], steps, loss, str(d["attempt"] or "-"), updated)
        table.add_row(*row, *([why] if waiting else []))
    console = Console()
    # An id that is cut off cannot be given to --resume: on a narrow terminal lines are longer instead.
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    if waiting and needed > console.width:  # one long message would make all lines as long; `gradus runs RUN` has it
        longest = max(map(cell_len, whys))
        shown = min(longest, max(_LEAST_WHY, console.width - (needed - longest)))
        table.columns[-1].max_width = shown
        needed -= longest - shown
    Console(width=max(console.width, needed)).print(table)


def _why_text(document: dict[str, Any]) -> str:
    text = str(document.get("reason") or document.get("note") or "")
    starts = document.get("starts_at")
    return f"{text}; may start {starts.replace('T', ' ')[:16]}" if text and starts else text


def _error_text(document: dict[str, Any]) -> str:
    """Of a run that failed, the first line of its error."""
    error = document["last_error"] if document["state"] == "failed" else None
    return first_line(error) if error else ""


def _print_run(run: RunDirectory) -> None:
    [document] = _documents([run])
    print(f"{document['name']}/{document['id']}: {document['state']}, attempt {document['attempt']}")
    if why := _why_text(document):
        print(f"job {document['job_id']}: {why}")
    if document["last_error"]:
        print(f"last error: {document['last_error']}")
    if "command" in document:
        print(f"command: {document['command']}")
    print()
    print(summary_text(run))
    print("\n" + "\n".join(costs_of(run).lines()))
    events = read_events(run)
    if events:
        print("\nlast events")
    for event in events[-_SHOWN_EVENTS:]:
        rest = {k: v for k, v in event.items() if k not in ("time", "writer", "event") and v is not None}
        details = "  ".join(f"{key}={value}" for key, value in rest.items())
        print(f"  {event['time'][:19].replace('T', ' ')}  {event['event']:<14} {details[:120]}")
